"""Exact continuation: the turns a policy sampled stay in later prompts, token for token. Pure.

A harness sends the whole conversation again with every call, and the chat template renders the
policy's turns anew: the tokenizer cuts them otherwise, JSON comes back with other spaces. The new
prompt then no longer begins with what the model saw and said. Where a re-rendered turn means the
same as the sampled one, the sampled tokens are put back; where it does not, nothing is repaired.

Renderings are compared with renderings to find the place of a turn (the template writes an earlier
turn alike in both, whatever was sampled), and texts with texts to see whether it was kept.
Special tokens cut the tokenizer's work, so what follows an ended turn is tokenised the same
whatever stands before it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

Reason = Literal[
    "first",  # no earlier call sampled anything
    "extends",  # the rendered prompt begins with an earlier prompt and answer as it is
    "continued",  # sampled tokens were put back
    "resampled",  # the same turn is asked for again: a sibling of the earlier answer
    "reasoning_stripped",  # the turn came back without its reasoning, otherwise the same
    "reasoning_changed",  # the turn came back with other reasoning, otherwise the same
    "turn_changed",  # the turn came back with another text or other calls
    "turn_dropped",  # another role speaks where the turn stood
    "forked",  # turns were kept, but what the harness or the template wrote behind one changed
    "new_root",  # no earlier prompt leads to this one
    "no_room",  # with the sampled tokens, which are more, the prompt would exceed the context
    "no_markers",  # the prompt does not end in an opened turn, so turns cannot be told apart
]


@dataclass(frozen=True, slots=True)
class Turn:
    """One earlier call of the attempt."""

    rendered_ids: np.ndarray
    """[N] int32, its prompt as the chat template rendered it"""
    prompt_ids: np.ndarray
    """[P] int32, its prompt as the model saw it"""
    sampled_ids: np.ndarray
    """[S] int32, with the stop token when it stopped on one"""


@dataclass(frozen=True, slots=True)
class Markers:
    """The special tokens that open and end a turn."""

    opens: frozenset[int]
    ends: frozenset[int]


@dataclass(frozen=True, slots=True)
class Continued:
    """The prompt the model shall see."""

    prompt_ids: np.ndarray
    """[P] int32, a copy"""
    parent: int | None
    """index of the longest earlier call whose prompt and answer `prompt_ids` begins with"""
    reason: Reason
    """`extends` and `continued` lengthen the sequence of `parent`; any other begins a branch"""


def continue_prompt(
    rendered_ids: np.ndarray, turns: Sequence[Turn], *, markers: Markers,
    decode: Callable[[Sequence[int]], str], keep_reasoning: bool = False,
) -> Continued:  # fmt: skip
    """The rendered prompt with the turns the policy sampled put back as they were sampled.

    `turns` are the attempt's earlier calls, oldest first. `decode` gives the text that a reply
    shows: special tokens left out. With `keep_reasoning` a turn whose reasoning was stripped counts
    as kept. The prompt may be longer than the rendered one: clamp max_tokens after it.

    A branch starts where the conversation changed: it shares the tokens before the changed turn.
    """
    said = [turn for turn in turns if len(turn.sampled_ids)]
    pasts = [past for turn in said if (past := _opened(turn, markers.opens))]
    reason, parts = _rootless(rendered_ids, said, markers), [rendered_ids]
    places = _longest([p for p in pasts if _begins(rendered_ids, p.rendered)], "rendered")
    rest = rendered_ids[len(places[0].rendered) :] if places else rendered_ids
    while places:
        reason, cut, past = _judge(places, rest, markers, decode, keep_reasoning)
        if reason != "continued":
            parts = [past.seen, rest]
            break
        prompt, sampled, rest = past.turn.prompt_ids, past.turn.sampled_ids, rest[cut:]
        parts = [prompt, sampled, rest]
        places = _longest([p for p in pasts if _follows(p, past, rest)], "seen")
        if places:
            rest = rest[len(places[0].seen) - len(prompt) - len(sampled) :]
    prompt_ids = np.concatenate(parts)
    parent = _parent(prompt_ids, turns)
    if reason == "continued" and np.array_equal(prompt_ids, rendered_ids):
        reason = "extends"
    if reason in ("continued", "extends") and _is_continued(parent, turns):
        reason = "forked"
    return Continued(prompt_ids, parent, reason)


def find_markers(
    with_generation_prompt: Sequence[int], without: Sequence[int], *,
    special_ids: Collection[int], eos_ids: Collection[int],
) -> Markers:  # fmt: skip
    """The markers, from a conversation that ends with an assistant's turn, rendered both ways.

    `special_ids` are all added tokens marked special (`added_tokens_decoder`; a tokenizer's
    `all_special_ids` lacks Llama's), `eos_ids` what sampling stops on. A template that adds no
    special token to ask for a turn (Mistral) has no `opens`.
    """
    common = _common(with_generation_prompt, without)
    opens = [i for i in with_generation_prompt[common:] if i in special_ids][:1]
    ended = [i for i in without if i in special_ids][-1:]
    return Markers(frozenset(opens), frozenset({*ended, *eos_ids}.difference(opens)))


def difference(sampled: str, rendered: str) -> Reason | None:
    """Why two texts of a turn are not the same action; None when they are.

    Same: text without outer whitespace, calls by JSON value, reasoning without outer whitespace.
    """
    written, shown = _pieces(_clean(sampled)), _pieces(_clean(rendered))
    if written == shown:
        return None
    thought, said = _split_reasoning(written)
    shown_thought, kept = _split_reasoning(shown) if _is_opener(shown) else ([], shown)
    if said != kept:
        return "turn_changed"
    if thought == shown_thought:
        return None
    return "reasoning_changed" if shown_thought else "reasoning_stripped"


# --- where the earlier turns stand


@dataclass(frozen=True, slots=True)
class _Past:
    """An earlier turn and what leads to it, up to and including the token that opens it."""

    turn: Turn
    rendered: np.ndarray
    seen: np.ndarray
    asked: np.ndarray
    """the generation prompt behind the opening token"""


_GENERATION_PROMPT = 64
"""More tokens than any template writes to ask for a turn."""


def _opened(turn: Turn, opens: frozenset[int]) -> _Past | None:
    n = _behind_open(turn.rendered_ids, opens)
    if n is None:
        return None
    rendered, asked = _cut_behind(turn.rendered_ids, n)
    seen, tail = _cut_behind(turn.prompt_ids, n)
    same = np.array_equal(asked, tail) and len(seen) and seen[-1] == rendered[-1]
    return _Past(turn, rendered, seen, asked) if same else None


def _cut_behind(token_ids: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    return token_ids[: len(token_ids) - n], token_ids[len(token_ids) - n :]


def _behind_open(token_ids: np.ndarray, opens: frozenset[int]) -> int | None:
    """How many tokens follow the last opening one."""
    tail = token_ids[-_GENERATION_PROMPT:].tolist()
    return next((n for n, i in enumerate(reversed(tail)) if i in opens), None)


def _longest(pasts: list[_Past], part: Literal["rendered", "seen"]) -> list[_Past]:
    """The earlier turns that stand furthest on, newest first: one, or resampled siblings."""
    longest = max((len(getattr(past, part)) for past in pasts), default=0)
    return [past for past in reversed(pasts) if len(getattr(past, part)) == longest]


def _follows(later: _Past, past: _Past, rest: np.ndarray) -> bool:
    """Whether `later` was asked after `past`, its answer, and what `rest` begins with.

    This finds turns behind one that the template now renders otherwise than it did.
    """
    prompt, sampled = past.turn.prompt_ids, past.turn.sampled_ids
    n = len(prompt) + len(sampled)
    return (
        len(later.seen) > n
        and _begins(rest, later.seen[n:])
        and _begins(later.seen[len(prompt) :], sampled)
        and _begins(later.seen, prompt)
    )


def _rootless(rendered_ids: np.ndarray, said: Sequence[Turn], markers: Markers) -> Reason:
    """The reason when no earlier turn has a place in the prompt."""
    if not said:
        return "first"
    if _parent(rendered_ids, said) is not None:
        return "extends"
    return "no_markers" if _behind_open(rendered_ids, markers.opens) is None else "new_root"


def _parent(prompt_ids: np.ndarray, turns: Sequence[Turn]) -> int | None:
    lengths = [len(turn.prompt_ids) + len(turn.sampled_ids) for turn in turns]
    for index in sorted(range(len(turns)), key=lambda i: (lengths[i], i), reverse=True):
        prompt, sampled = turns[index].prompt_ids, turns[index].sampled_ids
        answers = len(sampled) and _begins(prompt_ids[len(prompt) :], sampled)
        if answers and _begins(prompt_ids, prompt):
            return index
    return None


def _is_continued(parent: int | None, turns: Sequence[Turn]) -> bool:
    """Whether an earlier prompt already goes on behind the answer of `parent`."""
    assert parent is not None, "a prompt with sampled tokens put back begins with a prompt"
    prompt, sampled = turns[parent].prompt_ids, turns[parent].sampled_ids
    n = len(prompt)
    return any(
        _begins(turn.prompt_ids[n:], sampled) and _begins(turn.prompt_ids, prompt)
        for turn in turns
        if len(turn.sampled_ids)
    )


def _begins(token_ids: np.ndarray, prefix: np.ndarray) -> bool:
    """Whether `token_ids` begins with `prefix`; its last tokens first, they differ soonest."""
    n = len(prefix)
    return (
        n <= len(token_ids)
        and np.array_equal(token_ids[max(0, n - 16) : n], prefix[-16:])
        and np.array_equal(token_ids[:n], prefix)
    )


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(left), len(right)))


# --- whether a turn was kept

_OPEN_TOKENS = 16
"""More tokens than one character has bytes."""


def _judge(
    siblings: list[_Past], rest: np.ndarray, markers: Markers,
    decode: Callable[[Sequence[int]], str], keep_reasoning: bool,
) -> tuple[Reason, int, _Past]:  # fmt: skip
    """The sibling that `rest` keeps best, `continued` first, and how much of `rest` it replaces."""
    end = next(iter(np.flatnonzero(np.isin(rest, list(markers.ends))).tolist()), None)
    judged = [(*_judge_one(past, rest, end, markers, decode), past) for past in siblings]
    reason, cut, past = min(judged, key=lambda found: get_args(Reason).index(found[0]))
    if reason == "reasoning_stripped" and keep_reasoning:
        reason = "continued"
    return reason, cut, past


def _judge_one(
    past: _Past, rest: np.ndarray, end: int | None, markers: Markers,
    decode: Callable[[Sequence[int]], str],
) -> tuple[Reason, int]:  # fmt: skip
    said = np.concatenate([past.asked, past.turn.sampled_ids])
    if _begins(rest, said):
        return "continued", len(said)
    if end is None:
        return "resampled", 0
    has_ended = int(said[-1]) in markers.ends
    role = _THINK.split(decode(past.asked.tolist()), maxsplit=1)[0].rstrip()
    rendered = decode(rest[:end].tolist())
    if not rendered.startswith(role):
        return "turn_dropped", 0
    sampled = _reply(said.tolist(), decode).removeprefix(role)
    return difference(sampled, rendered.removeprefix(role)) or "continued", end + has_ended


def _reply(token_ids: list[int], decode: Callable[[Sequence[int]], str]) -> str:
    """Their text as it is streamed: tokens at the end that leave a character open never show."""
    for stop in range(len(token_ids), max(0, len(token_ids) - _OPEN_TOKENS), -1):
        text = decode(token_ids[:stop])
        if not text.endswith("\ufffd"):
            return text
    return text


# --- what a text means

_THINK = re.compile(r"<(?:\w+:)?think(?:ing)?>")
_THOUGHT = re.compile(r"</(?:\w+:)?think(?:ing)?>")
_PLACE = re.compile(
    r"(?P<value><(?P<name>parameter|arg_value)(?:[= ][^<>]*)?>)"
    r"|(?P<tag></?(?:\w+:)?(?:think(?:ing)?|tool_calls?|function(?:_calls?)?|invoke|arg_key"
    r"|parameter|arg_value)(?:[= ][^<>]*)?>)|[{\[]"
)
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_MAX_WASTED, _FAILURE, _DEEP = 100_000, 50, 5_000
"""Characters read in vain; behind that many the rest is text, so that garbage costs little."""


def _clean(text: str) -> str:
    """Without what a tokenizer or a stream of bytes may change: other forms of one character,
    the number of broken bytes."""
    return re.sub("\ufffd+", "\ufffd", unicodedata.normalize("NFC", text))


def _split_reasoning(pieces: list[str]) -> tuple[list[str], list[str]]:
    """(reasoning, the rest); an unclosed block runs to the end, an opener may be missing."""
    inner = pieces[_is_opener(pieces) :]
    closed = next((n for n, piece in enumerate(inner) if _THOUGHT.fullmatch(piece)), None)
    if closed is not None:
        return inner[:closed], inner[closed + 1 :]
    return (inner, []) if _is_opener(pieces) else ([], pieces)


def _is_opener(pieces: list[str]) -> bool:
    return bool(pieces and _THINK.fullmatch(pieces[0]))


def _pieces(text: str) -> list[str]:
    """The text cut at tags and JSON values, each in one form; lists are equal for one meaning."""
    pieces, behind = [], 0
    for start, stop, piece in _fixed(text):
        pieces += [text[behind:start].strip(), piece]
        behind = stop
    return [piece for piece in [*pieces, text[behind:].strip()] if piece]


def _fixed(text: str) -> Iterator[tuple[int, int, str]]:
    """(start, stop, one form) of every tag, tagged value and JSON value."""
    at = wasted = 0
    while wasted < _MAX_WASTED and (place := _PLACE.search(text, at)):
        stop, piece = _read(text, place)
        if piece:
            yield place.start(), stop, piece
            at = stop
        else:
            at = place.start() + 1
            wasted += _FAILURE + stop - at


def _read(text: str, place: re.Match[str]) -> tuple[int, str]:
    """(where it stops, its one form); no form when a bracket opens no JSON."""
    if place["tag"]:
        return place.end(), place["tag"]
    if place["value"]:
        stop = text.find(f"</{place['name']}>", place.end())
        value = text[place.end() : stop] if stop >= 0 else text[place.end() :].rstrip()
        return stop if stop >= 0 else len(text), place["value"] + _value(value)
    try:
        value, stop = _DECODER.raw_decode(text, place.start())
        return stop, _one_form(value)
    except json.JSONDecodeError as error:
        return error.pos, ""
    except (ValueError, RecursionError):  # a number of too many digits, brackets too deep
        return place.start() + _DEEP, ""


def _value(text: str) -> str:
    """A value between tags: exact but for a newline on either side, or JSON by value."""
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        return _one_form(_DECODER.decode(_LITERALS.get(text, text)))
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _one_form(value: Any) -> str:
    calls = [_call(item) for item in value] if isinstance(value, list) else _call(value)
    return json.dumps(calls, sort_keys=True, separators=(",", ":"))


def _call(value: Any) -> Any:
    """A call by one name for its arguments, and those as the object that a string may spell."""
    if not (isinstance(value, dict) and isinstance(value.get("name"), str)):
        return value
    key = "parameters" if "parameters" in value and "arguments" not in value else "arguments"
    others = {name: item for name, item in value.items() if name != key}
    return {**others, "arguments": _spelled(value[key])} if key in value else value


def _spelled(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        spelled = _DECODER.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return spelled if isinstance(spelled, dict) else arguments


_DECODER = json.JSONDecoder(strict=False, parse_float=_number)
