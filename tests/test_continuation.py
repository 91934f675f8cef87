"""Exact continuation on the chat templates of real families, with the histories harnesses send."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.decoders import DecodeStream
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from lightning_ray.engine.continuation import (
    Continued,
    Markers,
    Turn,
    continue_prompt,
    difference,
    find_markers,
)

TEMPLATES = Path(__file__).parent / "templates"
KEPT = ("extends", "continued")
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
WORDS = ["look", "at", "the", "file", "then", "run", "it", "naïve", "Žluť", "数据", "🙂", "3.14"]
PATTERN = (  # Qwen's and Llama's cut before the merges
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "What to run."}},
            },
        },
    }
]


# --- the families


@dataclass(frozen=True)
class Family:
    name: str
    template: str
    specials: tuple[str, ...] = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    form: str = "json"  # of a call: json in tags, xml in tags, bare json, none
    thinks: bool = False
    thought_open: bool = False  # the generation prompt opens the block
    says_with_calls: bool = True  # the template shows text beside calls
    options: dict[str, Any] = field(default_factory=dict)
    repair: tuple[str, str] = ("", "")

    def source(self) -> str:
        return (TEMPLATES / f"{self.template}.jinja").read_text().replace(*self.repair)


LLAMA = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
LLAMA_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_bare = {"specials": LLAMA, "stops": LLAMA_STOPS, "form": "bare", "says_with_calls": False}
HERMES = Family("hermes3", "hermes3", says_with_calls=False)
# the official template leaves a newline out behind the last tool result, and puts it there later
APPENDING = ("{{- '\n</tool_response>' }}", "{{- '\n</tool_response>\n' }}")
FAMILIES = [
    Family("qwen2.5", "qwen2_5"),
    Family("qwen3", "qwen3", thinks=True),
    Family("qwen3 no thinking", "qwen3", options={"enable_thinking": False}),
    Family("qwen3.5", "qwen3_5", form="xml", thinks=True, thought_open=True),
    Family("qwen3.5 no thinking", "qwen3_5", form="xml", options={"enable_thinking": False}),
    Family("llama3.1", "llama3_1", **_bare),  # type: ignore[arg-type]
    Family("llama3.2", "llama3_2", **_bare),  # type: ignore[arg-type]
    replace(HERMES, name="hermes3 appending", repair=APPENDING),
    Family("smollm2", "smollm2", form="none"),
]
BY_NAME = {family.name: family for family in [*FAMILIES, HERMES]}
by_family = pytest.mark.parametrize("family", FAMILIES, ids=[f.name for f in FAMILIES])


@cache
def trained() -> str:
    """A byte-level tokenizer with some merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    lines = [json.dumps(arguments(rng)) + "\n\n" + say(rng) + "\n" for _ in range(300)]
    corpus = [*lines, *[path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))]]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    return str(tokenizer.to_str())


class Server:
    """One family's tokenizer and template, as an engine has them."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.tokenizer = Tokenizer.from_str(trained())
        if family.name.startswith("qwen"):
            self.tokenizer.normalizer = normalizers.NFC()
        self.tokenizer.add_special_tokens([AddedToken(s, special=True) for s in family.specials])
        self.tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
        self.fast = PreTrainedTokenizerFast(
            tokenizer_object=self.tokenizer, bos_token=family.specials[0]
        )
        self.special_ids = {self.id(token) for token in family.specials}
        self.stop_ids = [self.id(token) for token in family.stops]
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        self.markers = find_markers(
            self.render(probe).tolist(), self.render(probe, ask=False).tolist(),
            special_ids=self.special_ids, eos_ids=self.stop_ids[:1],
        )  # fmt: skip
        self.markers = Markers(self.markers.opens, self.markers.ends | {*self.stop_ids})

    def id(self, token: str) -> int:
        found = self.tokenizer.token_to_id(token)
        assert found is not None, token
        return int(found)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def shown(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def render(self, messages: list[dict[str, Any]], *, ask: bool = True) -> np.ndarray:
        text = self.fast.apply_chat_template(
            messages, tools=None if self.family.form == "none" else TOOLS, tokenize=False,
            chat_template=self.family.source(), add_generation_prompt=ask,
            date_string="26 Jul 2024", **self.family.options,
        )  # fmt: skip
        return np.array(self.encode(text), np.int32)

    def continued(self, rendered: np.ndarray, turns: list[Turn], **options: Any) -> Continued:
        return continue_prompt(
            rendered, turns, markers=self.markers, decode=self.decode, **options
        )  # fmt: skip

    def streamed(self, token_ids: Sequence[int]) -> str:
        """The text of a reply: as vLLM streams it, token by token."""
        stream = DecodeStream(skip_special_tokens=True)
        return "".join(stream.step(self.tokenizer, i) or "" for i in token_ids)


@cache
def server(name: str) -> Server:
    return Server(BY_NAME[name])


# --- what a policy writes


def say(rng: random.Random) -> str:
    words = rng.choices(WORDS, k=rng.randint(1, 9))
    return (
        rng.choice(["", "", "\n\n", " "])
        + rng.choice([" ", "  "]).join(words)
        + rng.choice(["", "\n", "  "])
    )


def arguments(rng: random.Random) -> dict[str, Any]:
    commands = [
        "printf 'hé  llo\\n' > a\n", "  ls -la", 'echo "{\\"a\\":  1}" | jq .',
        "cat <<E\n<b> x </b>\nE", "grep '</think>' *.py", "🙂 数据\t", "", "awk '{print $1}'  f",
    ]  # fmt: skip
    optional = {
        "timeout": rng.choice([1.0, 30, 2.5]), "background": rng.random() < 0.5,
        "env": {"b": [1, 2, {"x": None}], "a": "é"}, "flags": ["-l", "a  b"],
    }  # fmt: skip
    chosen = rng.sample(sorted(optional), k=rng.randint(0, 3))
    return {"command": rng.choice(commands), **{key: optional[key] for key in chosen}}


def odd(value: Any, rng: random.Random) -> str:
    separators = rng.choice([(", ", ": "), (",", ":"), (" , ", " :  "), (",\n ", ": ")])
    return json.dumps(value, separators=separators, ensure_ascii=rng.random() < 0.5)


def write_call(family: Family, given: dict[str, Any], rng: random.Random) -> str:
    if family.form == "xml":
        values = [(k, v if isinstance(v, str) else odd(v, rng)) for k, v in given.items()]
        inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in values)
        return f"<tool_call>\n<function=shell>\n{inner}</function>\n</tool_call>"
    key = rng.choice(["arguments", "parameters"]) if family.form == "bare" else "arguments"
    call = odd({"name": "shell", key: given}, rng)
    space = rng.choice(["\n", "", " "])
    return call if family.form == "bare" else f"<tool_call>{space}{call}{space}</tool_call>"


def write(family: Family, rng: random.Random) -> str:
    """A turn: reasoning, text, calls, or nothing at all."""
    thought = say(rng) if family.thinks and rng.random() < 0.8 else ""
    opener = "" if family.thought_open else "<think>\n"
    text = f"{opener}{thought}\n</think>\n\n" if family.thinks and (thought or opener == "") else ""
    kind = rng.choice(["calls", "calls", "calls", "text", "broken", "nothing"])
    if kind == "nothing":
        return text
    calls = [arguments(rng) for _ in range(1 if family.form == "bare" else rng.randint(1, 3))]
    if kind == "text" or family.form == "none":
        return text + say(rng)
    if kind == "broken":
        return text + write_call(family, {"command": "ls"}, rng).replace("shell", 'sh"ell', 1)
    said = say(rng) + rng.choice(["", "\n", "\n\n"]) if family.says_with_calls else ""
    return text + said + rng.choice(["", "\n"]).join(write_call(family, c, rng) for c in calls)


def split_differently(token_ids: list[int], tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """The same bytes, 15 % of the tokens in two or more pieces."""
    out: list[int] = []
    for token_id in token_ids:
        token = tokenizer.id_to_token(token_id)
        at = rng.randint(1, max(1, len(token) - 1))
        parts = [tokenizer.token_to_id(part) for part in (token[:at], token[at:])]
        single = [tokenizer.token_to_id(letter) for letter in token]
        chosen = parts if None not in parts else single
        out += chosen if rng.random() < 0.15 and None not in chosen else [token_id]
    return out


def sample(server: Server, policy: str, rng: random.Random) -> np.ndarray:
    """An answer's token ids: canonical, split, or random; sometimes cut, with any stop token."""
    if policy == "random":
        barred = {*server.special_ids, server.id("<think>"), server.id("</think>")}
        ids = [rng.randrange(server.tokenizer.get_vocab_size()) for _ in range(rng.randint(1, 25))]
        ids = [i for i in ids if i not in barred]
    else:
        ids = server.encode(write(server.family, rng))
    if policy == "split":
        ids = split_differently(ids, server.tokenizer, rng)
    # the Qwen templates read a cut call that holds `</think>` as reasoning: not ours to keep
    if rng.random() < 0.12 and len(ids) > 2 and "grep" not in server.decode(ids):
        return np.array(ids[: rng.randrange(1, len(ids))], np.int32)
    return np.array([*ids, rng.choice(server.stop_ids)], np.int32)


# --- what a harness makes of it


def parse(family: Family, text: str) -> dict[str, Any]:
    """The message of a reply, as a server's reasoning and tool parsers make it."""
    reasoning = None
    if family.thinks and (family.thought_open or text.startswith("<think>")):
        reasoning, _, text = text.removeprefix("<think>").partition("</think>")
    behind = text.rpartition("</tool_call>")[
        2
    ]  # real parsers drop it, and then the turn did change
    calls = [] if family.form in ("json", "xml") and behind.strip() else PARSERS[family.form](text)
    if not calls:
        return {"role": "assistant", "content": text, "reasoning_content": reasoning}
    content = text.partition("<tool_call>")[0] if family.form != "bare" else ""
    made = [
        {"function": {"name": n, "arguments": json.dumps(a, ensure_ascii=False)}} for n, a in calls
    ]
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": made,
    }


def _parse_json(text: str) -> list[tuple[str, Any]]:
    found = re.findall("<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    try:
        calls = [json.loads(item) for item in found]
        named = [(call["name"], call["arguments"]) for call in calls]
    except (ValueError, KeyError, TypeError):
        return []
    return named if text.count("<tool_call>") == len(found) else []


def _parse_bare(text: str) -> list[tuple[str, Any]]:
    try:
        call = json.loads(text)
        return [(call["name"], call.get("parameters", call.get("arguments")))]
    except (ValueError, KeyError, TypeError):
        return []


def _parse_xml(text: str) -> list[tuple[str, Any]]:
    pattern = r"<tool_call>\s*<function=(\w+)>(.*?)</function>\s*</tool_call>"
    found = re.findall(pattern, text, re.DOTALL)
    if text.count("<tool_call>") != len(found):
        return []
    return [
        (name, dict(map(_typed, re.findall(PARAMETER, inner, re.DOTALL)))) for name, inner in found
    ]


PARAMETER = r"<parameter=(\w+)>(.*?)</parameter>"


def _typed(item: tuple[str, str]) -> tuple[str, Any]:
    key, value = item[0], item[1].removeprefix("\n").removesuffix("\n")
    return key, value if key == "command" else json.loads(value)


PARSERS: dict[str, Callable[[str], list[tuple[str, Any]]]] = {
    "json": _parse_json, "bare": _parse_bare, "xml": _parse_xml, "none": lambda text: [],
}  # fmt: skip


@dataclass(frozen=True)
class Style:
    """How a harness sends a turn back (harnesses.md, section 4)."""

    name: str
    arguments: Callable[[Any], str] | None = None  # None: the exact string
    strips: bool = False
    reasoning: str = "kept"
    parses: bool = True  # whether the server gives the template arguments as objects


def _as_javascript(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_javascript(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_javascript(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def compact(value: Any) -> str:
    return json.dumps(_as_javascript(value), separators=(",", ":"), ensure_ascii=False)


def unescaped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


STYLES = [
    Style("Codex"),
    Style("mini-swe-agent", parses=False),
    Style("opencode", compact),
    Style("Qwen Code", compact, reasoning="trimmed", strips=True),
    Style("OpenHands", json.dumps, reasoning="dropped"),
    Style("LangChain", unescaped, reasoning="dropped", parses=False),
    Style("strips", json.dumps, strips=True, parses=False),
]


def send_back(message: dict[str, Any], style: Style) -> dict[str, Any]:
    message = json.loads(json.dumps(message))
    reasoning = message.pop("reasoning_content", None)
    if style.strips:
        message["content"] = message["content"].strip()
    for call in message.get("tool_calls", ()):
        if style.arguments is not None:
            given = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = style.arguments(given)
    if reasoning is not None and style.reasoning != "dropped":
        kept = reasoning.strip() if style.reasoning == "trimmed" else reasoning
        message["reasoning_content"] = kept
    return dict(message)


def answered(message: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """What the world says next: one result for each call, or a user."""
    results = [
        {"role": "tool", "content": rng.choice(["done\n", '{"a":  1}', "", say(rng)])}
        for _ in message.get("tool_calls", ())
    ]
    return results or [{"role": "user", "content": say(rng)}]


def as_rendered(
    messages: list[dict[str, Any]], style: Style, family: Family
) -> list[dict[str, Any]]:
    """What the server gives the template."""
    if not style.parses and family.form != "xml":
        return messages
    messages = json.loads(json.dumps(messages))
    for call in [call for message in messages for call in message.get("tool_calls", ())]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


# --- a rollout


@dataclass
class Step:
    rendered: np.ndarray
    result: Continued
    sampled: np.ndarray
    message: dict[str, Any]
    stripped: bool  # whether this prompt lacks reasoning that the last one had, or that was sampled


class Rollout:
    """A conversation of one agent; several may share their turns."""

    def __init__(
        self, server: Server, style: Style, policy: str, seed: int, turns: list[Turn] | None = None,
        keep_reasoning: bool = False, system: str = "You are a coding agent.",
    ) -> None:  # fmt: skip
        self.server, self.style, self.policy = server, style, policy
        self.rng = random.Random(f"{server.family.name} {style.name} {policy} {seed}")
        self.turns = [] if turns is None else turns
        self.keep_reasoning = keep_reasoning
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            {"role": "user", "content": say(self.rng)},
        ]
        self.thoughts: list[bool] = []  # of the turns since the last user message
        self.steps: list[Step] = []

    def ask(self) -> tuple[np.ndarray, Continued]:
        messages = as_rendered(self.messages, self.style, self.server.family)
        rendered = self.server.render(messages)
        return rendered, self.server.continued(
            rendered, self.turns, keep_reasoning=self.keep_reasoning
        )

    def answer(self, asked: tuple[np.ndarray, Continued]) -> Step:
        rendered, result = asked
        sampled = sample(self.server, self.policy, self.rng)
        self.turns.append(Turn(rendered, result.prompt_ids, sampled))
        message = parse(self.server.family, self.server.streamed(sampled.tolist()))
        step = Step(rendered, result, sampled, message, self._lost())
        self.steps.append(step)
        return step

    def go_on(self, step: Step) -> None:
        """The harness takes the answer and the world replies."""
        kept = send_back(step.message, self.style)
        self.messages += [kept, *answered(kept, self.rng)]
        thought = bool((step.message["reasoning_content"] or "").strip(" \n\t\ufffd"))
        self.thoughts = [thought] if self._fresh() else [*self.thoughts, thought]

    def _fresh(self) -> bool:
        """Whether the newest turn answered a user."""
        last = max(i for i, m in enumerate(self.messages) if m["role"] == "assistant")
        return bool(self.messages[last - 1]["role"] == "user")

    def _lost(self) -> bool:
        if not self.thoughts:
            return False
        lost_now = self.messages[-1]["role"] == "user" and any(self.thoughts)
        if self.style.reasoning == "dropped":  # Qwen3.5 leaves an empty block until a user speaks
            return self.thoughts[-1] or (lost_now and self.server.family.template == "qwen3_5")
        return lost_now

    def play(self, num_turns: int) -> list[Step]:
        for _ in range(num_turns):
            self.go_on(self.answer(self.ask()))
        return self.steps


def begins(token_ids: np.ndarray, *parts: np.ndarray) -> bool:
    prefix = np.concatenate(parts)
    return np.array_equal(token_ids[: len(prefix)], prefix)


def blocks(server: Server, token_ids: np.ndarray) -> list[list[int]]:
    """The prompt cut before each token that opens a turn."""
    (opens,) = server.markers.opens
    cuts = [0, *np.flatnonzero(token_ids == opens).tolist(), len(token_ids)]
    ids = token_ids.tolist()
    return [ids[start:stop] for start, stop in pairwise(cuts)]


def assert_the_templates_text(server: Server, step: Step, turns: list[Turn]) -> None:
    """Block by block the template's own tokens, or a sampled answer and what stands behind it."""
    seen, shown = blocks(server, step.result.prompt_ids), blocks(server, step.rendered)
    asked = shown[-1]  # every turn of a rollout is asked for alike
    assert len(seen) == len(shown)
    for mine, theirs in zip(seen, shown, strict=True):
        if mine == theirs:
            continue
        end = min(i for i, token in enumerate(theirs) if token in server.markers.ends)
        allowed = (
            asked + sampled + theirs[end + (sampled[-1] in server.markers.ends) :]
            for sampled in (turn.sampled_ids.tolist() for turn in turns)
        )
        assert mine in allowed, server.shown(mine)


RATES: dict[str, list[int]] = {}


def count(family: Family, steps: list[Step], kept: list[bool]) -> None:
    rates = RATES.setdefault(family.name, [0, 0, 0])
    for before, step, is_kept in zip(steps, steps[1:], kept[1:], strict=False):
        rates[0] += is_kept
        joined = begins(step.result.prompt_ids, before.result.prompt_ids, before.sampled)
        rates[1] += is_kept and joined and step.result.reason in KEPT
        rates[2] += is_kept and begins(step.rendered, before.rendered, before.sampled)


# --- the facts


@by_family
@pytest.mark.parametrize("policy", ["canonical", "split", "random"])
def test_every_kept_turn_joins_and_every_changed_one_says_why(family: Family, policy: str) -> None:
    made = server(family.name)
    for seed, style in enumerate(STYLES if policy == "split" else STYLES[::2]):
        rollout = Rollout(made, style, policy, seed)
        steps = rollout.play(12)
        for index, step in enumerate(steps):
            expected = (
                ("first",) if index == 0 else ("reasoning_stripped",) if step.stripped else KEPT
            )
            assert step.result.reason in expected, (
                style,
                index,
                made.shown(step.rendered.tolist()),
            )
            assert_the_templates_text(made, step, rollout.turns)
            if expected == KEPT:
                before = rollout.turns[index - 1]
                assert begins(step.result.prompt_ids, before.prompt_ids, before.sampled_ids)
                assert step.result.parent == index - 1
        count(family, steps, [not step.stripped for step in steps])


def test_the_rates_with_and_without_continuation() -> None:
    if len(RATES) < len(FAMILIES):
        pytest.skip("the sessions ran in another process or not at all")
    print("\njoins of kept turns: template, kept, with continuation, plain")
    for name, (kept, joined, plain) in RATES.items():
        print(f"  {name:22}{kept:5}{joined:5} ({joined / kept:.0%}){plain:5} ({plain / kept:.0%})")
        assert joined == kept > 50
        assert plain < 0.8 * kept


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_keep_reasoning_keeps_every_turn_that_lost_only_its_reasoning(name: str) -> None:
    for seed, style in enumerate(STYLES[:5]):
        rollout = Rollout(server(name), style, "split", seed, keep_reasoning=True)
        for index, step in enumerate(rollout.play(8)[1:], start=1):
            before = rollout.turns[index - 1]
            assert step.result.reason in KEPT, (style, index)
            assert begins(step.result.prompt_ids, before.prompt_ids, before.sampled_ids)
            assert_the_templates_text(rollout.server, step, rollout.turns)


def test_the_official_hermes_template_rewrites_tool_results_and_so_forks() -> None:
    reasons = {
        step.result.reason
        for step in Rollout(server("hermes3"), STYLES[0], "canonical", 1).play(12)
    }
    assert "forked" in reasons
    assert reasons <= {"first", "forked", *KEPT}


# --- histories written by hand


class Chat:
    """A conversation whose answers are given as text."""

    def __init__(self, name: str) -> None:
        self.server, self.turns = server(name), list[Turn]()
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]

    def ask(self, **options: Any) -> Continued:
        rendered = self.server.render(self.messages)
        self.asked = rendered, self.server.continued(rendered, self.turns, **options)
        return self.asked[1]

    def sample(self, text: str, stop: str | None = "<|im_end|>") -> Turn:
        """As a policy that takes one byte after the other."""
        pieces = [i for letter in text for i in self.server.encode(letter)]
        if self.server.family.thinks:
            pieces = self.server.encode(text)
        ids = pieces + ([] if stop is None else [self.server.id(stop)])
        self.turns.append(Turn(self.asked[0], self.asked[1].prompt_ids, np.array(ids, np.int32)))
        return self.turns[-1]

    def say(self, *messages: dict[str, Any]) -> None:
        self.messages = [*self.messages, *messages]


def assistant(content: str = "", *, reasoning: str | None = None, **given: Any) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": value}} for name, value in given.items()]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"tool_calls": calls} if calls else {}
    return message | ({} if reasoning is None else {"reasoning_content": reasoning})


USER = {"role": "user", "content": "and now?"}
TOOL = {"role": "tool", "content": "done"}
CALL = '<tool_call>{"name":"shell","arguments":{"command":"ls  -l","n":1.0}}</tool_call>'
GIVEN = {"command": "ls  -l", "n": 1}


def after(
    name: str, text: str, *messages: dict[str, Any], **options: Any
) -> tuple[Chat, Continued]:
    chat = Chat(name)
    chat.ask()
    chat.sample(text)
    chat.say(*messages)
    return chat, chat.ask(**options)


@pytest.mark.parametrize(
    ("reason", "messages"),
    [
        ("continued", [assistant("so", shell=GIVEN), TOOL]),
        ("continued", [assistant("\n\nso ", shell=json.dumps(GIVEN, indent=1)), TOOL]),
        ("turn_changed", [assistant("so", shell={"command": "ls -l", "n": 1}), TOOL]),
        ("turn_changed", [assistant("so", shell={"command": "ls  -l"}), TOOL]),
        ("turn_changed", [assistant("so", invalid=GIVEN), TOOL]),
        ("turn_changed", [assistant("So", shell=GIVEN), TOOL]),
        ("turn_changed", [assistant("so"), USER]),
        ("turn_changed", [assistant("so", shell=GIVEN, other={}), TOOL, TOOL]),
        ("turn_dropped", [USER]),
    ],
)
def test_what_a_harness_does_to_a_turn_has_a_reason(
    reason: str, messages: list[dict[str, Any]]
) -> None:
    chat, result = after("qwen2.5", "so\n" + CALL, *messages)
    assert result.reason == reason
    turn = chat.turns[0]
    assert begins(result.prompt_ids, turn.prompt_ids, turn.sampled_ids) == (reason == "continued")
    assert result.parent == (0 if reason == "continued" else None)
    if reason != "continued":
        assert np.array_equal(result.prompt_ids, chat.asked[0])


def test_a_rewritten_malformed_call_branches_and_a_verbatim_one_continues() -> None:
    broken = '<tool_call>{"name": "shell", "arguments": {"command": "l"s"}}</tool_call>'
    assert after("qwen2.5", broken, assistant(broken), USER)[1].reason == "continued"
    rewritten = assistant(shell={"_malformed": True, "raw": broken})
    assert after("qwen2.5", broken, rewritten, TOOL)[1].reason == "turn_changed"


def test_reasoning_may_be_kept_trimmed_stripped_or_changed() -> None:
    said = "<think>\n\n why \n\n</think>\n\n" + CALL
    for reasoning in ("\n\n why \n\n", "why"):
        kept = assistant(reasoning=reasoning, shell=GIVEN)
        assert after("qwen3", said, kept, TOOL)[1].reason == "continued"
    changed = assistant(reasoning="because", shell=GIVEN)
    assert after("qwen3", said, changed, TOOL)[1].reason == "reasoning_changed"
    dropped = assistant(shell=GIVEN)
    assert after("qwen3", said, dropped, TOOL)[1].reason == "reasoning_stripped"
    chat, result = after("qwen3", said, dropped, TOOL, keep_reasoning=True)
    assert result.reason == "continued"
    assert begins(result.prompt_ids, chat.turns[0].prompt_ids, chat.turns[0].sampled_ids)


def test_a_closing_tag_in_the_text_does_not_make_it_reasoning() -> None:
    said = "<think>\nwhy\n</think>\n\nwrite </think> there"
    assert difference(said, "write </think> there") == "reasoning_stripped"


def test_a_prompt_that_differs_far_in_front_is_another_root() -> None:
    chat, _ = after("qwen2.5", "hello " * 30, assistant("hello " * 30), USER)
    chat.sample("one")
    chat.messages = [
        {"role": "system", "content": "Other."},
        *chat.messages,
        assistant("one"),
        USER,
    ]
    assert chat.ask().reason == "new_root"
    ids = np.arange(100, dtype=np.int32)
    markers = Markers(frozenset({99}), frozenset({98}))
    turn = Turn(ids, ids, np.array([7, 98], np.int32))
    other = np.concatenate([[5], ids[1:], [7, 98, 99]]).astype(np.int32)
    assert continue_prompt(other, [turn], markers=markers, decode=str).reason == "new_root"


def test_a_branch_shares_the_sampled_tokens_before_the_changed_turn() -> None:
    chat, _ = after("qwen2.5", CALL, assistant(shell=GIVEN), TOOL)
    chat.sample("second")
    chat.say(assistant("edited"), USER)
    result = chat.ask()
    assert (result.reason, result.parent) == ("turn_changed", 0)
    assert begins(result.prompt_ids, chat.turns[1].prompt_ids)


def test_the_same_prompt_again_is_a_sibling_and_the_kept_one_goes_on() -> None:
    chat, first = after("qwen2.5", CALL, assistant(shell=GIVEN), TOOL)
    for text in ("one", "two", "two  ", "three"):
        chat.sample(text)
        again = chat.ask()
        assert (again.reason, again.parent) == ("resampled", 0)
        assert np.array_equal(again.prompt_ids, first.prompt_ids)
    chat.say(assistant("two"), USER)
    result = chat.ask()
    assert (result.reason, result.parent) == ("continued", 3)
    assert begins(result.prompt_ids, chat.turns[3].prompt_ids, chat.turns[3].sampled_ids)


@pytest.mark.parametrize("stop", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", None])
def test_any_stop_token_or_none_ends_a_kept_turn(stop: str | None) -> None:
    chat = Chat("llama3.2")
    chat.ask()
    chat.sample("  well, 数据", stop)
    chat.say(assistant("well, 数据"), USER)
    result = chat.ask()
    turn = chat.turns[0]
    assert result.reason == "continued"
    tail = result.prompt_ids[len(turn.prompt_ids) + len(turn.sampled_ids) :].tolist()
    opened = [chat.server.id("<|start_header_id|>")]
    assert (
        tail[: 1 + (stop is None)] == ([chat.server.id("<|eot_id|>")] if not stop else []) + opened
    )


def test_a_special_token_that_starts_a_call_is_no_part_of_the_action() -> None:
    chat = Chat("llama3.1")
    chat.ask()
    call = np.array(
        [chat.server.id("<|python_tag|>"), *chat.server.encode('{"name":"shell","parameters":{}}')]
    )
    ids = np.append(call, chat.server.id("<|eom_id|>")).astype(np.int32)
    chat.turns.append(Turn(chat.asked[0], chat.asked[1].prompt_ids, ids))
    chat.say(assistant(shell={}), TOOL)
    assert chat.ask().reason == "continued"


def test_an_answer_cut_inside_a_character_is_kept() -> None:
    chat = Chat("qwen2.5")
    chat.ask()
    ids = chat.server.encode("done ") + chat.server.encode("🦀")[:-1]
    chat.turns.append(Turn(chat.asked[0], chat.asked[1].prompt_ids, np.array(ids, np.int32)))
    chat.say(assistant(chat.server.streamed(ids)), USER)
    assert chat.ask().reason == "continued"


def test_an_empty_answer_is_kept() -> None:
    for name in ("qwen2.5", "qwen3 no thinking", "qwen3.5 no thinking"):
        chat, result = after(name, "", assistant(""), USER)
        assert result.reason in KEPT
        assert begins(result.prompt_ids, chat.turns[0].prompt_ids, chat.turns[0].sampled_ids)


def test_a_compaction_is_a_new_root() -> None:
    chat, _ = after("qwen2.5", CALL, assistant(shell=GIVEN), TOOL)
    chat.sample("a summary")
    chat.messages = [{"role": "user", "content": "So far: a summary"}]
    result = chat.ask()
    assert (result.reason, result.parent) == ("new_root", None)
    assert np.array_equal(result.prompt_ids, chat.asked[0])


def test_two_agents_of_one_attempt_keep_to_their_own_sequence() -> None:
    turns: list[Turn] = []
    agents = [
        Rollout(server("qwen2.5"), STYLES[2], "split", seed, turns=turns, system=f"Agent {seed}.")
        for seed in range(2)
    ]
    latest: dict[int, Turn] = {}
    for index in range(12):
        agent = agents[index % 3 % 2]
        step = agent.answer(agent.ask())
        assert step.result.reason in (KEPT if id(agent) in latest else ("new_root", "first"))
        if before := latest.get(id(agent)):
            assert begins(step.result.prompt_ids, before.prompt_ids, before.sampled_ids)
        latest[id(agent)] = turns[-1]
        agent.go_on(step)


def test_one_answer_continued_twice_is_a_fork() -> None:
    chat, _ = after("qwen2.5", CALL, assistant(shell=GIVEN), TOOL)
    chat.sample("one")
    chat.messages[-1] = {"role": "tool", "content": "another result"}
    result = chat.ask()
    assert (result.reason, result.parent) == ("forked", 0)


def test_a_call_that_gave_nothing_leaves_no_trace() -> None:
    chat, first = after("qwen2.5", CALL, assistant(shell=GIVEN), TOOL)
    chat.turns.append(Turn(chat.asked[0], first.prompt_ids, np.zeros(0, np.int32)))
    again = chat.ask()
    assert (again.reason, again.parent) == (first.reason, 0) == ("continued", 0)


def test_prompts_without_opened_turns_only_extend() -> None:
    made = server("qwen2.5")
    prompt, sampled = (np.array(made.encode(text), np.int32) for text in ("Once upon", " a time"))
    turns = [Turn(prompt, prompt, sampled)]
    longer = np.concatenate([prompt, sampled, prompt])
    result = made.continued(longer, turns)
    assert (result.reason, result.parent) == ("extends", 0)
    assert np.array_equal(result.prompt_ids, longer)
    assert made.continued(longer[1:], turns).reason == "no_markers"
    assert made.continued(longer, []).reason == "first"
    assert made.continued(longer, [replace(turns[0], sampled_ids=sampled[:0])]).reason == "first"


@by_family
def test_markers_are_found_by_asking_the_template(family: Family) -> None:
    made = server(family.name)
    opener = "<|start_header_id|>" if family.form == "bare" else "<|im_start|>"
    assert made.markers.opens == {made.id(opener)}
    assert made.markers.ends == {made.id(token) for token in family.stops}


def test_a_template_that_asks_with_no_special_token_has_no_opening_marker() -> None:
    assert find_markers([1, 5, 2], [1, 5, 2], special_ids={1, 2}, eos_ids=[2]).opens == frozenset()
    found = find_markers([1, 5, 2, 9, 1, 6], [1, 5, 2, 9], special_ids={1, 2, 3}, eos_ids=[3])
    assert found == Markers(frozenset({1}), frozenset({2, 3}))


# --- the same action

SAME = [
    ("  hi \n", "hi"),
    ("<think>\n\n</think>\n\nhi", "hi"),
    ("<think>\n", "<think>\n\n</think>\n\n"),
    ("<think>a\n</think>hi", "<think>\na\n</think>\n\nhi"),
    ("why\n</think>hi", "<think>\nwhy\n</think>\n\nhi"),
    ('so\n\n<tool_call>\n{"a" : 1.0}\n</tool_call>\n', 'so<tool_call>{"a":1}</tool_call>'),
    ('{"b": "\\u00e9\\ud83d\\ude42", "a": 1e2}', '{"a":100,"b":"é🙂"}'),
    ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"name":"f","arguments":{"x":1}}'),
    ('{"name": "f", "arguments": {"x": 1}}', '{"name":"f","parameters":{"x":1}}'),
    ('[{"name": "f"}]', '[ {"name":"f"} ]'),
    ("<parameter=a>x</parameter>", "<parameter=a>\nx\n</parameter>"),
    ('<parameter=a>\n{"b":[1]}\n</parameter>', '<parameter=a>\n{"b": [1]}\n</parameter>'),
    ("<parameter=a>true</parameter>", "<parameter=a>\nTrue\n</parameter>"),
    ('{"a": "x\ny"}', '{"a": "x\\ny"}'),
    ("e\u0301", "\u00e9"),
    ("a\ufffd\ufffdb", "a\ufffdb"),
    ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}  "),
]
OTHER = [
    ("a  b", "a b"),
    ("a <b> c", "a<b>c"),
    ("", "hi"),
    ('{"a": "x  y"}', '{"a": "x y"}'),
    ('{"a": " x"}', '{"a": "x"}'),
    ('{"a": "\\n"}', '{"a": ""}'),
    ('{"a": 1}', '{"a": true}'),
    ('{"a": 1}', '{"a": "1"}'),
    ('{"a": null}', "{}"),
    ('{"a": 12345678901234567890}', '{"a": 12345678901234567000}'),
    ('{"a": "<think></think>"}', '{"a": ""}'),
    ('{"name": "f", "parameters": {"parameters": "{ }"}}',
     '{"name": "f", "parameters": {"parameters": "{}"}}'),
    ('{"x": "f", "arguments": "{}"}', '{"x": "f", "arguments": {}}'),
    ('{"name": "f", "arguments": {"a": 1,}}', '{"name": "f", "arguments": {"a": 1}}'),
    ("<parameter=a>\nx\n\n</parameter>", "<parameter=a>\nx\n</parameter>"),
    ("<parameter=a>\n x\n</parameter>", "<parameter=a>\nx\n</parameter>"),
    ('<parameter=a>\necho {"b":1}\n</parameter>', '<parameter=a>\necho {"b": 1}\n</parameter>'),
    ("<function=a>", "<function=b>"),
]  # fmt: skip


@pytest.mark.parametrize(("left", "right"), SAME)
def test_r8_one_action_in_two_spellings(left: str, right: str) -> None:
    assert difference(left, right) is None


@pytest.mark.parametrize(("left", "right"), OTHER)
def test_two_actions_that_look_alike(left: str, right: str) -> None:
    assert difference(left, right) == difference(right, left) == "turn_changed"


def test_values_are_equal_in_any_spelling_and_differ_in_any_letter() -> None:
    rng = random.Random(7)
    for _ in range(400):
        value = arguments(rng) | {say(rng): say(rng), "deep": [arguments(rng)]}
        shuffled = dict(rng.sample(list(value.items()), len(value)))
        wrapped = [f"so <tool_call>{odd(v, rng)}</tool_call>" for v in (value, shuffled)]
        assert difference(wrapped[0], wrapped[1]) is None
        text = json.dumps(value)
        at = rng.randrange(len(text))
        if text[at].isalnum() and text[at - 1] not in "\\u.0123456789":
            assert difference(text, text[:at] + "Q" + text[at + 1 :]) == "turn_changed"


@pytest.mark.parametrize(
    "piece", ["[", '{"a":[', "{", "<parameter=a>", "[1,", '{"', " ", "\ufffd", "<think>", '["a", ']
)
@pytest.mark.timeout(30)  # milliseconds; a search that goes back over the text takes minutes
def test_garbage_is_read_once(piece: str) -> None:
    assert difference(piece * 20_000 + "x", piece * 20_000 + " y") is not None


def test_a_rollout_of_a_hundred_turns_is_one_sequence() -> None:
    rng = np.random.default_rng(0)
    markers = Markers(frozenset({1}), frozenset({2}))
    rendered = seen = np.array([1, 50, 2, 1, 60], np.int32)
    turns = []
    for _ in range(100):
        body = rng.integers(10, 1000, 500).astype(np.int32)
        turns.append(Turn(rendered, seen, np.append(body, 2).astype(np.int32)))
        added = np.concatenate([[2, 1, 70], rng.integers(10, 1000, 500), [2, 1, 60]]).astype(
            np.int32
        )
        rendered = np.concatenate([rendered, body, added])
        seen = np.concatenate([seen, body, added])
    result = continue_prompt(
        rendered, turns, markers=markers, decode=lambda ids: " ".join(map(str, ids))
    )
    assert len(rendered) > 100_000
    assert (result.reason, result.parent) == ("extends", 99)
