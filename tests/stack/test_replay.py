"""Captured sessions of real harnesses, posted again: the official SDKs can read every reply, each
call is tagged, and the session is as few sequences as its harness allows.

The policy plays the captured answers, so each history holds what was sampled, as the harness sent
it back. `tests/wire` holds the captures (notes/harnesses.md, section 9); one more file is one more
test, which names what to add to EXPECTED.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lightning_ray.samples import build_samples
from tests.conftest import Stack
from tests.stack.test_calls import Seat

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

WIRE = Path(__file__).parent.parent / "wire"
JOINED: dict[str | None, str] = {"extends": "kept", "continued": "kept"}
THREE = [("main", "first"), ("main", "kept"), ("main", "kept")]
EXPECTED: dict[str, tuple[int, list[tuple[str, str]]]] = {
    # compaction asks without the last answer, and once more as the policy called a tool
    "claude_code_compaction": (4, [("main", "first"), ("compaction", "turn_dropped"),
                                   ("compaction", "turn_dropped"), ("main", "new_root")]),
    "claude_code_malformed_args": (1, [("main", "first")]),
    "claude_code_subagent": (2, [("main", "first"), ("subagent", "new_root"), ("main", "kept")]),
    # compaction shows no tools, so its prompt differs from the start
    "codex_compaction": (3, [("main", "first"), ("compaction", "new_root"), ("main", "new_root")]),
    "codex_subagent": (2, [("main", "first"), ("main", "kept"), ("subagent", "new_root"),
                           ("main", "kept")]),
    "mini_malformed_args": (2, [("main", "first"), ("main", "turn_dropped")]),
    # a message that moves along at the end of every prompt
    "openclaw": (3, [("main", "first"), ("main", "new_root"), ("main", "new_root")]),
}  # fmt: skip
"""By capture: how many samples, and each call's kind and how it joins those before it."""


NOT_HTTP = "codex_websocket"


@pytest.mark.parametrize("name", sorted({path.stem for path in WIRE.glob("*.json")} - {NOT_HTTP}))
def test_a_captured_session_is_read_tagged_and_joined(stack: Stack, name: str) -> None:
    seat, reply_ids = Seat(stack), dict[str, str]()
    for exchange in exchanges_of(WIRE / f"{name}.json"):
        said = said_in(exchange["response"])
        script = Path(os.environ["LR_TEST_SCRIPT"])
        script.write_text(json.dumps([{"when": "", "say": said}]))
        body = exchange["request"]["body"]
        if body.get("previous_response_id"):
            body["previous_response_id"] = reply_ids[body["previous_response_id"]]
        text, reply_id = ask(seat, exchange["request"])
        reply_ids[exchange["response"].get("assembled", {}).get("id", "")] = reply_id
        shown = said.partition("<tool_call>")[0]  # but a call that cannot be parsed stays text
        assert text.strip() == shown.strip() or (text == said and not is_call(said, body))
        script.unlink()
    calls = seat.calls()
    samples = build_samples(calls, rollout_id="r", group_id="g")
    found = len(samples), [(call.kind, JOINED.get(call.joined, call.joined)) for call in calls]
    assert found == EXPECTED.get(name, (1, THREE)), name
    assert sum(int(sample.mask.sum()) for sample in samples) == sum(
        len(call.sampled_ids) for call in calls
    )


def exchanges_of(path: Path) -> Iterator[dict[str, Any]]:
    """The model calls over HTTP; tools that are named by reference are put in."""
    tools: Any = None
    for exchange in json.loads(path.read_text())["exchanges"]:
        body = exchange["request"].get("body")
        if isinstance(body, dict) and "response" in exchange:
            tools = tools or body.get("tools")
            body["tools"] = tools if isinstance(body.get("tools"), str) else body.get("tools", [])
            yield exchange


def is_call(said: str, body: dict[str, Any]) -> bool:
    """Whether the answer holds a call that vLLM's parser takes for one."""
    call = said.partition("<tool_call>")[2].partition("</tool_call>")[0]
    try:
        return bool(body["tools"]) and bool(json.loads(call))
    except ValueError:
        return False


def said_in(response: dict[str, Any]) -> str:
    """What the model said, as the tiny model's template writes it."""
    text, calls = "", list[dict[str, str]]()
    for kind, value in _parts(response):
        if kind == "text":
            text += value
        elif kind == "name":
            calls.append({"name": value, "arguments": ""})
        else:
            calls[-1]["arguments"] += value
    return text + "".join(
        f'<tool_call>{{"name": "{call["name"]}", "arguments": {call["arguments"]}}}</tool_call>'
        for call in calls
    )


def _parts(response: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if "sse" in response:
        for event in response["sse"].split("\n\n"):
            data = event.rpartition("data: ")[2]
            if data.startswith("{"):
                yield from _parts_of_event(json.loads(data))
        return
    whole = response["assembled"]
    if "choices" in whole:
        yield from _parts_of_message(whole["choices"][0]["message"])
    elif "content" in whole:
        for block in whole["content"]:
            yield from _parts_of_event({"content_block": block, "delta": block})
    for item in whole.get("output", []):
        yield from _parts_of_item(item)


def _parts_of_event(event: dict[str, Any]) -> Iterator[tuple[str, str]]:
    block, delta = event.get("content_block", {}), event.get("delta", {})
    if event.get("type") == "response.output_item.done":
        yield from _parts_of_item(event["item"])
    if block.get("type") == "tool_use":
        yield "name", block["name"]
        if delta is block:
            yield "arguments", json.dumps(block["input"])
    if isinstance(delta, dict) and "partial_json" in delta:
        yield "arguments", delta["partial_json"]
    elif isinstance(delta, dict) and delta.get("type") in ("text_delta", "text"):
        yield "text", delta["text"]
    for choice in event.get("choices", []):
        yield from _parts_of_message(choice["delta"])


def _parts_of_message(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if message.get("content"):
        yield "text", message["content"]
    for call in message.get("tool_calls", []):
        if call["function"].get("name"):
            yield "name", call["function"]["name"]
        yield "arguments", call["function"].get("arguments", "")


def _parts_of_item(item: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if item["type"] == "message":
        yield "text", "".join(part["text"] for part in item["content"])
    elif item["type"] == "function_call":
        space = f"{item['namespace']}__" if item.get("namespace") else ""
        yield "name", space + item["name"]
        yield "arguments", item["arguments"]


def ask(seat: Seat, request: dict[str, Any]) -> tuple[str, str]:
    """The text and the id of the reply, read by the official SDK."""
    body, name = request["body"], request["path"].rpartition("/")[2]
    headers = {
        key: value for key, value in request["headers"].items()
        if key.lower().startswith(("x-c", "x-o", "x-s", "thread", "session"))
        and not key.lower().startswith("x-stainless")
    }  # fmt: skip
    sent: Any = {"model": "x", "extra_body": body, "extra_headers": headers}
    if name == "messages":
        return _ask_anthropic(seat, sent, streamed=body.get("stream", False))
    if name == "responses":
        return _ask_responses(seat, sent, streamed=body.get("stream", False))
    completions = seat.openai.chat.completions
    if not body.get("stream"):
        reply = completions.create(messages=[], **sent)
    else:
        with completions.stream(messages=[], **sent) as stream:
            reply = stream.get_final_completion()
    return reply.choices[0].message.content or "", reply.id


def _ask_anthropic(seat: Seat, sent: Any, *, streamed: bool) -> tuple[str, str]:
    messages = seat.anthropic.messages
    if streamed:
        with messages.stream(max_tokens=1, messages=[], **sent) as stream:
            reply = stream.get_final_message()
    else:
        reply = messages.create(max_tokens=1, messages=[], **sent)
    return "".join(block.text for block in reply.content if block.type == "text"), reply.id


def _ask_responses(seat: Seat, sent: Any, *, streamed: bool) -> tuple[str, str]:
    if not streamed:
        reply = seat.openai.responses.create(input="", **sent)
        return reply.output_text, reply.id
    with seat.openai.responses.stream(input="", **sent) as stream:
        for _ in stream:
            continue
        reply = stream.get_final_response()
    return reply.output_text, reply.id


async def test_r21_codex_is_told_to_use_http_instead_of_a_websocket(stack: Stack) -> None:
    seat = Seat(stack)
    (first, *_) = json.loads((WIRE / f"{NOT_HTTP}.json").read_text())["exchanges"]
    headers = {
        name: value for name, value in first["request"]["headers"].items()
        if not name.lower().startswith("sec-") and name.lower() != "upgrade"
    }  # fmt: skip
    headers["Authorization"] = f"Bearer {seat.key}"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{seat.base_url}/v1/responses", headers=headers)
    assert refused.value.status == 426
