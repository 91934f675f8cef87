"""What differs between the wire formats: their errors, keep-alives and last events.

vLLM's own routes speak the protocols; nothing of them is implemented here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    426: "upgrade_required",
    503: "overloaded_error",
}
_OVERFLOW = re.compile(r"maximum context length is (\d+) tokens\D+?(\d+) input tokens")
_LAST_EVENTS = {
    "chat": re.compile(rb'data: \[DONE\]|"finish_reason": ?"'),
    "completions": re.compile(rb'data: \[DONE\]|"finish_reason": ?"'),
    "messages": re.compile(rb"event: message_(delta|stop)\b"),
    "responses": re.compile(rb"event: response\.(completed|incomplete|failed)\b"),
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One wire format."""

    name: str
    path: str
    """Below `/v1/`."""
    limit_fields: tuple[str, ...]
    """Where a body says how many tokens it wants, the one that counts first."""
    samples: bool = True
    """Whether a call samples from the policy, and so is recorded."""

    def error(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """An error body as this dialect's SDKs expect it."""
        kind = _ERROR_TYPES.get(status, "api_error")
        if self.name == "messages":
            return _json({"type": "error", "error": {"type": kind, "message": message}})
        problem = {"message": message, "type": kind, "param": None, "code": code or kind}
        return _json({"error": problem})

    def engine_error(self, status: int, body: bytes) -> bytes:
        """An error of vLLM's in this dialect's shape; a prompt too long in the words that
        harnesses act on: Claude Code and Codex look for them before they compact."""
        message = _message(body)
        if found := _OVERFLOW.search(message):
            limit, size = found.groups()
            if self.name == "messages":
                return self.error(400, f"prompt is too long: {size} tokens > {limit} maximum")
            return self.error(400, message, code="context_length_exceeded")
        return self.error(status, message)

    def keep_alive(self, reply_id: str, index: int, *, streamed: bool) -> bytes:
        """What tells a waiting harness that its call is alive; never an SSE comment, which Codex,
        OpenClaw and Qwen Code do not count (notes/harnesses.md, section 6)."""
        if not streamed:
            return b" "
        if self.name == "messages":
            return b'event: ping\ndata: {"type":"ping"}\n\n'
        if self.name == "responses":
            kind = "response.in_progress" if index else "response.created"
            return _event(kind, index, _response(reply_id, "in_progress"))
        return b"data: " + _json(_empty_chunk(self.name, reply_id)) + b"\n\n"

    def stream_error(self, problem: bytes, reply_id: str, index: int) -> bytes:
        """The event that ends a stream with an error body; harnesses then ask again."""
        if self.name == "messages":
            return b"event: error\ndata: " + problem + b"\n\n"
        if self.name == "responses":
            error = {"code": "server_is_overloaded", "message": _message(problem)}
            response = {**_response(reply_id, "failed"), "error": error}
            return _event("response.failed", index, response)
        return b"data: " + problem + b"\n\n"

    def last_event(self, body: bytearray, start: int) -> int:
        """Where in an event stream, from `start` on, the events begin that tell the harness its
        reply is whole; the end of the whole events when none has come yet."""
        found = _LAST_EVENTS[self.name].search(body, start)
        end = body.rfind(b"\n\n", start, found.start() if found else len(body))
        return start if end < 0 else end + 2


DIALECTS = {
    dialect.path: dialect
    for dialect in (
        Dialect("chat", "chat/completions", ("max_completion_tokens", "max_tokens")),
        Dialect("completions", "completions", ("max_tokens",)),
        Dialect("responses", "responses", ("max_output_tokens",)),
        Dialect("messages", "messages", ("max_tokens",)),
        Dialect("messages", "messages/count_tokens", (), samples=False),
        Dialect("models", "models", (), samples=False),
    )
}


def after_keep_alives(body: bytes, *, num_sent: int, reply_id: str) -> bytes:
    """A Responses stream whose opening has been sent already: without it, numbered on from it,
    and of the same response."""
    events = []
    for event in body.split(b"\n\n"):
        kind, _, data = event.partition(b"\ndata: ")
        if kind in (b"event: response.created", b"event: response.in_progress"):
            continue
        if data:
            fields = msgspec.json.decode(data)
            fields["sequence_number"] = fields.get("sequence_number", 0) + num_sent
            if "response" in fields:
                fields["response"]["id"] = reply_id
            event = kind + b"\ndata: " + _json(fields)
        events.append(event)
    return b"\n\n".join(events)


def _message(body: bytes) -> str:
    """What an error body says, whichever shape it has."""
    try:
        error = msgspec.json.decode(body, type=dict[str, Any]).get("error")
    except (msgspec.DecodeError, msgspec.ValidationError):
        return body.decode(errors="replace")[:2000]
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def _empty_chunk(name: str, reply_id: str) -> dict[str, Any]:
    is_chat = name == "chat"
    nothing: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
    choice = {"index": 0, "finish_reason": None, **nothing}
    kind = "chat.completion.chunk" if is_chat else "text_completion"
    return {"id": reply_id, "object": kind, "created": 0, "model": "", "choices": [choice]}


def _response(reply_id: str, status: str) -> dict[str, Any]:
    return {
        "id": reply_id, "object": "response", "created_at": 0, "status": status, "model": "",
        "output": [], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True,
        "error": None, "incomplete_details": None, "instructions": None, "metadata": {},
    }  # fmt: skip


def _event(kind: str, index: int, response: dict[str, Any]) -> bytes:
    data = _json({"type": kind, "sequence_number": index, "response": response})
    return f"event: {kind}\ndata: ".encode() + data + b"\n\n"


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)
