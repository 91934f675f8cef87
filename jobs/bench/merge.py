"""How many rows a rollout becomes, with continuation off and on.

    python -m jobs.bench.merge [--sessions 200] [--turns 30] [--template qwen3_5 ...]

A row is one sample of `build_samples`; a rollout of one row is whole. Every prompt goes through
`Sessions` as in the engine; with continuation off the model sees the prompt as it was rendered.
Two corpora, the chat templates of `tests/templates`, and a small tokenizer trained for the tests:

- wire: the captured linear sessions of six Chat Completions clients in `tests/wire`, three calls
  each. The policy says what was captured, without the reasoning; the template shows one tool of the
  tests instead of the client's own. Messages and Responses clients are left out: converting their
  messages takes the server. No lines for templates that know no calls or ask for reasoning.
- made: sessions in the harness styles of `tests/test_continuation.py`: calls as they came,
  compact or escaped, text as it came or stripped; and broken calls, as text. Where a template asks
  for reasoning, only the styles that return it play and every turn calls a tool: when a user
  speaks, or the style drops it, the reasoning goes and the rollout branches by design.

Three policies: `canonical` writes what the template would, in the tokenizer's tokens; `split 15 %`
the same text with 15 % of the tokens in pieces; `odd JSON` has other spaces in and around JSON,
other escapes, any of the stop tokens or, where an answer is cut short, none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_ray.engine.continuation import Turn
from lightning_ray.engine.sessions import Sessions
from lightning_ray.samples import build_samples
from lightning_ray.schema import Call
from tests import test_continuation as made
from tests.stack.test_replay import WIRE, exchanges_of, said_in

TEMPLATES = ["qwen2_5", "qwen3_5", "llama3_2"]
"""One for each way to write calls, with reasoning and without; the others take longer."""
POLICIES = ("canonical", "split 15 %", "odd JSON")
CAPTURED = [
    "mini_swe_agent", "openhands_sdk", "sdk_agents_chat", "sdk_langchain", "sdk_openai",
    "sdk_openai_stream",
]  # fmt: skip
LINE = "{:7}{:21}{:12}{:>8}  {:16}{:18}{}"
HEAD = (
    "corpus", "template", "policy", "sessions", "rows off -> on", "whole off -> on",
    "breaks when on",
)  # fmt: skip
CONTEXT = 1 << 20
GREETING = [{"role": "user", "content": "go"}]
Session = list[tuple[np.ndarray, np.ndarray]]
"""Of each call the prompt as rendered and what was sampled; continuation changes neither."""
Message = dict[str, Any]


def main() -> None:
    templates = sorted({family.template for family in made.FAMILIES})
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sessions", type=int, default=200, help="of each generated corpus")
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--template", nargs="+", choices=templates, default=TEMPLATES)
    options = parser.parse_args()
    began_at = time.monotonic()
    print(LINE.format(*HEAD))
    for family in [f for f in made.FAMILIES if f.template in options.template]:
        server = made.server(family.name)
        for policy in POLICIES:
            wire, generated = captured(server, policy), generate(server, policy, options)
            for corpus, sessions in (("wire", wire), ("made", generated)):
                if measured := asyncio.run(measure(server, sessions)):
                    print(LINE.format(corpus, family.name, policy, *measured), flush=True)
    print(f"{time.monotonic() - began_at:.0f} s")


async def measure(server: made.Server, sessions: Iterator[Session]) -> list[str]:
    """The numbers of one line; none without sessions."""
    off, on, breaks = list[int](), list[int](), Counter[str | None]()
    options = {"markers": server.markers, "decode": server.decode, "keep_reasoning": False}
    for session in sessions:
        calls = await play(session, Sessions(no_calls, **options))
        for rows, recorded in ((off, await play(session, None)), (on, calls)):
            rows.append(len(build_samples(recorded, rollout_id="r", group_id="g")))
        breaks.update(call.joined for call in calls if call.joined not in ("first", *made.KEPT))
    if not on:
        return []
    means = f"{np.mean(off):.2f} -> {np.mean(on):.3f}"
    whole = " -> ".join(f"{counts.count(1) / len(counts):.1%}" for counts in (off, on))
    why = ", ".join(f"{reason} {n}" for reason, n in breaks.most_common()) or "none"
    return [str(len(on)), means, whole, why]


async def no_calls(rollout_id: str, attempt: int) -> list[Call]:
    """What another engine recorded of the attempt."""
    return []


async def play(session: Session, sessions: Sessions | None) -> list[Call]:
    """The calls that the store would hold."""
    calls = []
    for index, (rendered, sampled) in enumerate(session):
        prompt, joined, key = rendered, None, f"r/0/{index}"
        if sessions is not None:
            continued = await sessions.continued(key, rendered, CONTEXT)
            prompt, joined = continued.prompt_ids, continued.reason
            sessions.add(key, [Turn(rendered, prompt, sampled)])
        n = len(sampled)
        calls.append(Call(
            call_id=key, rollout_id="r", attempt=0, index=index, dialect="chat", status=200,
            error=None, prompt_ids=prompt, sampled_ids=sampled, logprobs=np.zeros(n, np.float32),
            versions=np.zeros(n, np.int32), finish_reason="stop", started_at=float(index),
            duration_s=0.0, request=b"", response=b"", rendered_ids=rendered, joined=joined,
        ))  # fmt: skip
    return calls


# --- generated sessions


def generate(server: made.Server, policy: str, options: argparse.Namespace) -> Iterator[Session]:
    thinks = server.family.thinks
    styles = [s for s in made.STYLES if not thinks or s.reasoning != "dropped"]
    for seed in range(options.sessions):
        rng = random.Random(f"{server.family.name} {policy} {seed}")
        yield list(converse(server, policy, styles[seed % len(styles)], rng, options.turns))


def converse(
    server: made.Server, policy: str, style: made.Style, rng: random.Random, num_turns: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    messages = [
        {"role": "system", "content": "You are a coding agent."},
        {"role": "user", "content": made.say(rng)},
    ]
    for _ in range(num_turns):
        sampled, message = answer(server, policy, rng)
        yield render(server, messages), sampled
        kept = made.send_back(message, style)
        messages += [kept, *made.answered(kept, rng)]


def answer(server: made.Server, policy: str, rng: random.Random) -> tuple[np.ndarray, Message]:
    """A turn's tokens and its message; on a template that asks for reasoning it calls a tool."""
    message: Message = {}
    while not message or (server.family.thinks and "tool_calls" not in message):
        sampled = made.sample(server, "canonical", rng)
        message = read(server, sampled)
    if policy == "odd JSON":
        return sampled, message
    sampled = as_template(server, message, policy, rng)
    return sampled, read(server, sampled)


def read(server: made.Server, sampled: np.ndarray) -> Message:
    """The message that a server's parsers make; Qwen3.5's template writes Python's literals."""
    said = server.streamed(sampled.tolist())
    for literal in ("True", "False"):
        said = said.replace(f">\n{literal}\n<", f">\n{literal.lower()}\n<")
    return made.parse(server.family, said)


def as_template(
    server: made.Server, message: Message, policy: str, rng: random.Random
) -> np.ndarray:
    """The tokens of a turn in the template's own words, up to its stop token."""
    asked = server.shown(render(server, GREETING).tolist())
    whole = server.shown(render(server, [*GREETING, message], ask=False).tolist())
    assert whole.startswith(asked), whole
    ids = server.encode(whole[len(asked) :])
    stop = next(n for n, i in enumerate(ids) if i in server.stop_ids)
    said = ids[:stop]
    if policy == "split 15 %":
        said = made.split_differently(said, server.tokenizer, rng)
    return np.array([*said, ids[stop]], np.int32)


def render(server: made.Server, messages: list[Message], *, ask: bool = True) -> np.ndarray:
    """With arguments as objects, in any style: so vLLM gives them to a template."""
    return server.render(made.as_rendered(messages, made.STYLES[0], server.family), ask=ask)


# --- captured sessions


def captured(server: made.Server, policy: str) -> Iterator[Session]:
    knows_calls = server.family.form != "none" and not server.family.thinks
    for name in CAPTURED if knows_calls else ():
        rng = random.Random(f"{name} {policy}")
        exchanges = exchanges_of(WIRE / f"{name}.json")
        yield [captured_call(server, policy, exchange, rng) for exchange in exchanges]


def captured_call(
    server: made.Server, policy: str, exchange: dict[str, Any], rng: random.Random
) -> tuple[np.ndarray, np.ndarray]:
    """A captured call's prompt, and its answer as the policy writes it."""
    rendered = render(server, [plain(m) for m in exchange["request"]["body"]["messages"]])
    message = made.parse(made.BY_NAME["qwen2.5"], said_in(exchange["response"]))
    if policy != "odd JSON":
        return rendered, as_template(server, message, policy, rng)
    ids = [*server.encode(odd(server.family, message, rng)), rng.choice(server.stop_ids)]
    return rendered, np.array(ids, np.int32)


def odd(family: made.Family, message: Message, rng: random.Random) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = message["content"] if family.says_with_calls or not calls else ""
    for call in calls:
        written = made.write_call(family, json.loads(call["arguments"]), rng)
        said += written.replace("shell", call["name"], 1)
    return said


def plain(message: Message) -> Message:
    """Content as one string, and no reasoning."""
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    kept = {key: message[key] for key in ("role", "tool_calls") if key in message}
    return {**kept, "content": content}


if __name__ == "__main__":
    main()
