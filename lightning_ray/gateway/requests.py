"""What real harnesses send, made acceptable to vLLM's routes; and what a request says of itself.

Fields vLLM does not know are left alone. What it would refuse and no template renders (built-in
tools, calls to them, foreign encrypted reasoning) is taken out, and named in `Prepared.dropped`.
The record keeps the body as the harness sent it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from lightning_ray import wire
from lightning_ray.gateway.dialects import Dialect

Fields = dict[str, Any]
Kind = Literal["main", "subagent", "compaction", "title", "commit-message", "prewarm"]

_SAMPLING_FIELDS = {
    "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
}  # fmt: skip
_SEAL = "lr1-"
_EFFORTS = {"none", "minimal", "low", "medium", "high", "xhigh", "max"}
_BLOCKS = {
    "text", "image", "tool_use", "tool_result", "tool_reference", "thinking", "redacted_thinking",
}  # fmt: skip
_ITEMS = {
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call",
    "custom_tool_call_output",
}  # fmt: skip
_KEPT_HEADERS = {
    "user-agent", "session-id", "thread-id", "x-claude-code-session-id", "x-claude-code-agent-id",
    "x-codex-parent-thread-id", "x-codex-turn-metadata", "x-codex-window-id", "x-openai-subagent",
    "x-session-id", "x-parent-session-id", "x-litellm-session-id", "traceparent",
    "x-stainless-retry-count",
}  # fmt: skip
_COMPACTION = (
    "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.",
    "You are performing a CONTEXT CHECKPOINT COMPACTION",
    "context summarization agent",
)


@dataclass
class Prepared:
    """A request as vLLM's route takes it, and the sampling for the engine."""

    fields: Fields
    sampling: wire.Sampling
    streamed: bool
    seals_reasoning: bool
    """Whether reasoning must go out encrypted, or the harness would not send it back."""
    dropped: list[str] = field(default_factory=list)

    def body(self) -> bytes:
        """The request as JSON."""
        return msgspec.json.encode(self.fields)


def decode(body: bytes) -> Fields:
    """The fields of a body; ValueError says what is wrong."""
    try:
        return msgspec.json.decode(body, type=Fields)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeError) as error:
        raise ValueError(f"the body must be a JSON object: {error}") from error


def prepare(
    fields: Fields, dialect: Dialect, *, served_name: str, sampling: wire.Sampling
) -> Prepared:
    """The request for vLLM's route; ValueError says what is wrong.

    Any model name is mapped to the policy, and the rollout's sampling wins. The limit travels
    beside the body, since vLLM refuses one that exceeds the context, and harnesses ask for more
    than small models have.
    """
    fields = {**fields, "model": served_name}
    if sampling.temperature is not None:  # the rollout decides; a clash must not become a 400
        fields = {name: value for name, value in fields.items() if name not in _SAMPLING_FIELDS}
    limited = msgspec.structs.replace(sampling, max_tokens=_limit(fields, dialect, sampling))
    streamed = fields.get("stream") is True
    seals = "reasoning.encrypted_content" in _list(fields.get("include"))
    prepared = Prepared(fields, limited, streamed, seals)
    if accept := _ACCEPT.get(dialect.name):
        accept(fields, prepared.dropped)
    if sampling.temperature is not None:
        _free_choice(fields, dialect, prepared.dropped)
    return prepared


def describe(fields: Fields, headers: Mapping[str, str]) -> tuple[Kind, str, dict[str, str]]:
    """What the request says of itself: its kind, its thread, and the headers worth keeping.

    A thread is one conversation of a rollout; a sub-agent's is not its parent's.
    """
    kept = {name: value for name, value in headers.items() if name in _KEPT_HEADERS}
    threads = ("x-claude-code-agent-id", "thread-id", "x-session-id")
    thread = next((kept[name] for name in threads if kept.get(name)), "")
    return _kind(fields, kept), thread, kept


def seal_reasoning(body: bytes, *, streamed: bool) -> bytes:
    """A Responses reply whose reasoning items carry their text as `encrypted_content` too."""
    if b'"reasoning"' not in body:
        return body
    if not streamed:
        return msgspec.json.encode(_sealed(msgspec.json.decode(body)))
    events = []
    for event in body.split(b"\n\n"):
        head, mark, data = event.partition(b"\ndata: ")
        if b'"reasoning"' in data:
            data = msgspec.json.encode(_sealed(msgspec.json.decode(data)))
        events.append(head + mark + data)
    return b"\n\n".join(events)


def with_conversation(fields: Fields, exchanges: Sequence[tuple[bytes, bytes]]) -> Fields:
    """A Responses request with its whole conversation in place of `previous_response_id`.

    exchanges: (request, response) bodies recorded in this attempt; KeyError with the id when
               none of them has it.
    """
    last = fields.get("previous_response_id")
    if not last:
        return fields
    history = _conversation(exchanges, str(last))
    return {**fields, "input": [*history, *_items(fields.get("input"))]}


def _conversation(exchanges: Sequence[tuple[bytes, bytes]], response_id: str) -> list[Any]:
    """The items up to and including a response."""
    for request, response in exchanges:
        if response_id.encode() in response and (reply := _reply(response))["id"] == response_id:
            earlier = with_conversation(decode(request), exchanges)
            return [*_items(earlier.get("input")), *reply.get("output", [])]
    raise KeyError(response_id)


def _reply(body: bytes) -> Fields:
    """The response object in a body or at the end of an event stream."""
    if not body.startswith(b"event:"):
        return {"id": None} | msgspec.json.decode(body, type=Fields)
    _, _, last = body.rpartition(b"\ndata: ")
    return {"id": None} | msgspec.json.decode(last.strip())["response"]


def _limit(fields: Fields, dialect: Dialect, sampling: wire.Sampling) -> int | None:
    """The tokens the answer may have; the body is left with a limit vLLM always takes."""
    names = dialect.limit_fields
    fields.pop("min_tokens", None)  # vLLM compares it with the limit left in the body
    asked = [fields.pop(name) for name in names if fields.get(name) is not None]
    if asked and not (type(asked[0]) is int and asked[0] > 0):
        raise ValueError(f"`{names[0]}` must be a positive integer; got {asked[0]!r}")
    if names:
        fields[names[-1]] = 1
    return min([n for n in (*asked[:1], sampling.max_tokens) if n is not None], default=None)


def _accept_chat(fields: Fields, dropped: list[str]) -> None:
    _keep_tools(fields, dropped, lambda tool: isinstance(tool.get("function"), dict))
    if not _is_in(fields.get("reasoning_effort"), _EFFORTS):
        fields.pop("reasoning_effort", None)
    for message in _dicts(fields.get("messages")):
        for call in _dicts(message.get("tool_calls")):
            function = call.get("function")
            if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
                function["arguments"] = msgspec.json.encode(function.get("arguments")).decode()


def _accept_messages(fields: Fields, dropped: list[str]) -> None:
    _keep_tools(fields, dropped, lambda tool: isinstance(tool.get("input_schema"), dict))
    if isinstance(fields.get("thinking"), dict) and fields["thinking"].get("type") == "enabled":
        fields["thinking"] = {"type": "adaptive"}  # a budget must be below vLLM's limit, which is 1
    for message in _dicts(fields.get("messages")):
        if isinstance(message.get("content"), list):
            message["content"] = _known(message["content"], _BLOCKS, dropped) or ""


def _accept_responses(fields: Fields, dropped: list[str]) -> None:
    _keep_tools(
        fields, dropped, lambda tool: tool.get("type") in ("function", "namespace", "custom")
    )
    for tool in _dicts(fields.get("tools")):
        if tool["type"] == "custom":
            tool.pop("format", None)  # a grammar cannot be enforced; the text is free
    for name in ("include", "background", "store", "previous_response_id"):
        fields.pop(name, None)
    if isinstance(fields.get("input"), list):
        fields["input"] = _known(fields["input"], _ITEMS, dropped)
    for item in _dicts(fields.get("input")):
        if item.get("type") == "reasoning":
            _unseal(item, dropped)


_ACCEPT = {"chat": _accept_chat, "messages": _accept_messages, "responses": _accept_responses}


def _keep_tools(fields: Fields, dropped: list[str], is_known: Any) -> None:
    """Tools that a template can show; without any, `tools` and `tool_choice` go too."""
    if not isinstance(fields.get("tools"), list):
        return
    known = [tool for tool in fields["tools"] if isinstance(tool, dict) and is_known(tool)]
    others = [tool for tool in fields["tools"] if tool not in known]
    dropped += [f"tool {tool.get('type') if isinstance(tool, dict) else tool}" for tool in others]
    fields["tools"] = known
    if not known:
        fields.pop("tools")
        fields.pop("tool_choice", None)


def _free_choice(fields: Fields, dialect: Dialect, dropped: list[str]) -> None:
    """A tool that the harness insists on would be sampled under a grammar, from a distribution
    that is not the policy's; the policy has to choose it by itself."""
    choice = fields.get("tool_choice")
    if (choice.get("type") if isinstance(choice, dict) else choice) not in (None, "auto", "none"):
        dropped.append("tool_choice")
        fields["tool_choice"] = {"type": "auto"} if dialect.name == "messages" else "auto"


def _known(items: list[Any], kinds: set[str], dropped: list[str]) -> list[Any]:
    """The items whose `type` is one of `kinds`, or that have none."""
    known = []
    for item in items:
        if isinstance(item, dict) and not _is_in(item.get("type", "message"), kinds | {"message"}):
            dropped.append(str(item.get("type")))
        else:
            known.append(item)
    return known


def _kind(fields: Fields, headers: Mapping[str, str]) -> Kind:
    turn = _turn_metadata(headers)
    if turn.get("request_kind") in ("compaction", "prewarm"):
        return turn["request_kind"]
    tail, system = _text(_last(fields)), _text(fields.get("system")) or _text(_first(fields))
    if any(words in tail or words in system for words in _COMPACTION):
        return "compaction"
    if not fields.get("tools"):
        if "commit message" in system.lower():
            return "commit-message"
        if _asks_for_title(fields, system):
            return "title"
    is_subagent = {"x-claude-code-agent-id", "x-openai-subagent", "x-parent-session-id"} & set(
        headers
    )
    return "subagent" if is_subagent else "main"


def _asks_for_title(fields: Fields, system: str) -> bool:
    output = fields.get("output_config")
    schema = output.get("format") if isinstance(output, dict) else None
    return "title generator" in system.lower() or '"title"' in str(schema).replace("'", '"')


def _turn_metadata(headers: Mapping[str, str]) -> dict[str, Any]:
    try:
        return msgspec.json.decode(headers.get("x-codex-turn-metadata", "{}"), type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return {}


def _first(fields: Fields) -> Any:
    return (_turns(fields) or [None])[0]


def _last(fields: Fields) -> Any:
    return (_turns(fields) or [None])[-1]


def _turns(fields: Fields) -> list[Any]:
    return _list(fields.get("messages")) or _items(fields.get("input"))


def _text(value: Any) -> str:
    """All text in a message, a content list, or a string."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if isinstance(value, dict):
        return _text(value.get("content", value.get("text", "")))
    return ""


def _sealed(value: Any) -> Any:
    if isinstance(value, list):
        return [_sealed(item) for item in value]
    if not isinstance(value, dict):
        return value
    value = {name: _sealed(item) for name, item in value.items()}
    if value.get("type") == "reasoning":
        text = _text(value.get("content")).encode()
        value["encrypted_content"] = _SEAL + base64.b64encode(text).decode()
    return value


def _unseal(item: Fields, dropped: list[str]) -> None:
    """Reasoning that came back: its text, if we sealed it."""
    sealed = item.pop("encrypted_content", None)
    if sealed is None:
        return
    try:
        mark, _, text = str(sealed).partition(_SEAL)
        if mark or not text:
            raise ValueError("another server's")
        text = base64.b64decode(text, validate=True).decode()
    except ValueError:
        dropped.append("encrypted_content")
    else:
        item["content"] = [{"type": "reasoning_text", "text": text}]


def _is_in(value: Any, words: set[str]) -> bool:
    return isinstance(value, str) and value in words


def _items(value: Any) -> list[Any]:
    """The input of a Responses request as items."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else _list(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dicts(value: Any) -> list[Fields]:
    return [item for item in _list(value) if isinstance(item, dict)]
