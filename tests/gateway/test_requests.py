"""Requests as real harnesses send them, made acceptable without losing what they mean."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_ray import wire
from lightning_ray.gateway import requests
from lightning_ray.gateway.dialects import DIALECTS

WIRE = Path(__file__).parent.parent / "wire"
CHAT, MESSAGES = DIALECTS["chat/completions"], DIALECTS["messages"]
RESPONSES = DIALECTS["responses"]
TRAIN = wire.Sampling(temperature=1.0, max_tokens=100)
FUNCTION = {"type": "function", "function": {"name": "a"}}


def prepare(fields: dict[str, Any], dialect: Any = CHAT, sampling: Any = TRAIN) -> Any:
    return requests.prepare(fields, dialect, served_name="policy", sampling=sampling)


def exchanges(name: str) -> list[dict[str, Any]]:
    found = json.loads((WIRE / f"{name}.json").read_text())["exchanges"]
    return [item["request"] for item in found if "body" in item["request"]]


def kinds(name: str) -> list[str]:
    return [
        requests.describe(r["body"], {k.lower(): v for k, v in r["headers"].items()})[0]
        for r in exchanges(name)
    ]


def test_r2_session_thread_and_agent_headers_are_kept_and_keys_are_not() -> None:
    _, thread, client = requests.describe(
        {}, {"thread-id": "t", "session-id": "s", "authorization": "Bearer sk", "x-api-key": "sk"}
    )
    assert (thread, client) == ("t", {"thread-id": "t", "session-id": "s"})


def test_r10_a_sub_agents_thread_is_not_its_parents() -> None:
    threads = [
        requests.describe(r["body"], {k.lower(): v for k, v in r["headers"].items()})[1]
        for r in exchanges("claude_code_subagent")
    ]
    assert threads == ["", "a0c6b1db8505e7ef8", ""]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("claude_code", ["main"] * 3),
        ("claude_code_subagent", ["main", "subagent", "main"]),
        ("claude_code_compaction", ["main", "compaction", "compaction", "main"]),
        ("codex", ["main"] * 3),
        ("codex_subagent", ["main", "main", "subagent", "main"]),
        ("codex_compaction", ["main", "compaction", "main"]),
        ("openclaw", ["main"] * 3),
        ("mini_swe_agent", ["main"] * 3),
    ],
)
def test_r12_calls_are_tagged_by_what_they_are_for(name: str, expected: list[str]) -> None:
    assert kinds(name) == expected


@pytest.mark.parametrize(
    ("fields", "headers", "kind"),
    [
        ({"messages": [{"role": "system", "content": "You are a title generator."}]}, {}, "title"),
        ({"tools": [], "output_config": {"format": {"schema": {"properties": {"title": {}}}}}},
         {}, "title"),
        ({"messages": [{"role": "system", "content": "Write a commit message."}]}, {},
         "commit-message"),
        ({}, {"x-codex-turn-metadata": '{"request_kind":"prewarm"}'}, "prewarm"),
        ({}, {"x-codex-turn-metadata": "not json"}, "main"),
        ({}, {"x-parent-session-id": "p"}, "subagent"),
        ({"messages": 3, "input": {}, "system": 1, "tools": "?"}, {}, "main"),
    ],
)  # fmt: skip
def test_r12_side_calls_are_told_apart(
    fields: dict[str, Any], headers: dict[str, str], kind: str
) -> None:
    assert requests.describe(fields, headers)[0] == kind


def test_r13_the_rollouts_sampling_and_model_win() -> None:
    asked = {"model": "gpt-9", "temperature": 0, "top_p": 0.1, "seed": 1, "n": 3}
    found = prepare(asked)
    assert found.fields == {"model": "policy", "max_tokens": 1}
    assert found.sampling == TRAIN


@pytest.mark.parametrize(
    ("dialect", "choice", "expected"),
    [
        (CHAT, "required", "auto"), (CHAT, "none", "none"), (CHAT, "auto", "auto"),
        (CHAT, {"type": "function", "function": {"name": "a"}}, "auto"),
        (RESPONSES, {"type": "function", "name": "a"}, "auto"),
        (MESSAGES, {"type": "any"}, {"type": "auto"}),
        (MESSAGES, {"type": "tool", "name": "a"}, {"type": "auto"}),
        (MESSAGES, {"type": "none"}, {"type": "none"}),
        (CHAT, [3], "auto"),
    ],
)  # fmt: skip
def test_r13_a_tool_that_is_insisted_on_is_left_to_the_policy(
    dialect: Any, choice: Any, expected: Any
) -> None:
    tools = [{"name": "a", "type": "function", "function": {"name": "a"}, "input_schema": {}}]
    fields = {"tools": tools, "tool_choice": choice}
    assert prepare(fields, dialect).fields["tool_choice"] == expected
    assert prepare(fields, dialect, wire.Sampling()).fields["tool_choice"] == choice


def test_r13_a_served_model_keeps_the_clients_wishes() -> None:
    found = prepare({"temperature": 0.3}, sampling=wire.Sampling())
    assert found.fields["temperature"] == 0.3


@pytest.mark.parametrize(
    ("dialect", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (RESPONSES, "max_output_tokens"),
     (MESSAGES, "max_tokens")],
)  # fmt: skip
def test_r14_a_limit_beyond_the_rollouts_is_lowered(dialect: Any, field: str) -> None:
    assert prepare({field: 128000}, dialect).sampling.max_tokens == 100
    assert prepare({field: 7}, dialect).sampling.max_tokens == 7
    for wrong in (0, -1, "many", 1.5, True):
        with pytest.raises(ValueError, match=f"`{dialect.limit_fields[0]}` must be"):
            prepare({dialect.limit_fields[0]: wrong}, dialect)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("messages", {"type": "invalid_request_error",
                      "message": "prompt is too long: 70000 tokens > 65536 maximum"}),
        ("chat/completions", {"code": "context_length_exceeded"}),
        ("responses", {"code": "context_length_exceeded"}),
    ],
)  # fmt: skip
def test_r15_overflow_is_said_in_the_words_harnesses_look_for(
    name: str, error: dict[str, str]
) -> None:
    body = json.dumps({"error": {"message": "This model's maximum context length is 65536 tokens. "
                                 "However, your prompt contains at least 70000 input tokens, "
                                 "which exceeds it.", "type": "BadRequestError"}})  # fmt: skip
    found = json.loads(DIALECTS[name].engine_error(400, body.encode()))["error"]
    assert error.items() <= found.items()


@pytest.mark.parametrize(
    "body", [b"", b"no json", b"[]", b'{"error": 3}', b"\xff", b'{"error":{}}']
)
def test_any_error_body_becomes_the_dialects_own(body: bytes) -> None:
    for dialect in DIALECTS.values():
        assert "error" in json.loads(dialect.engine_error(500, body))


def test_r17_what_no_template_can_show_is_left_out_and_named() -> None:
    found = prepare({"tools": [FUNCTION, {"type": "web_search"}], "tool_choice": "auto"})
    assert (found.fields["tools"], found.dropped) == ([FUNCTION], ["tool web_search"])
    found = prepare({"tools": [{"type": "web_search"}, 3], "tool_choice": "auto"})
    assert "tools" not in found.fields
    assert "tool_choice" not in found.fields
    found = prepare({"tools": [{"type": "web_search_20250305", "name": "w"}]}, MESSAGES)
    assert found.dropped == ["tool web_search_20250305"]
    items = [{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "x"}]
    found = prepare({"input": items, "include": ["alien"], "background": True}, RESPONSES)
    assert found.fields["input"] == items[1:]
    assert {"include", "background"}.isdisjoint(found.fields)


def test_r17_namespaced_and_custom_tools_stay_for_vllm_to_flatten() -> None:
    tools = [{"type": "namespace", "name": "n", "tools": []},
             {"type": "custom", "name": "patch", "format": {"type": "grammar"}}]  # fmt: skip
    found = prepare({"tools": tools}, RESPONSES).fields["tools"]
    assert [tool["type"] for tool in found] == ["namespace", "custom"]
    assert "format" not in found[1]


def test_r17_arguments_that_are_no_string_become_one() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": {"x": 1}}}
    found = prepare({"messages": [{"role": "assistant", "tool_calls": [call]}]})
    arguments = found.fields["messages"][0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"x": 1}


def test_r19_thinking_with_a_budget_does_not_clash_with_the_limit() -> None:
    found = prepare({"thinking": {"type": "enabled", "budget_tokens": 1024}}, MESSAGES)
    assert found.fields["thinking"] == {"type": "adaptive"}


@pytest.mark.parametrize("streamed", [False, True])
def test_r20_sealed_reasoning_comes_back_as_its_text(streamed: bool) -> None:
    item = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "hé"}]}
    reply = json.dumps({"output": [item]}).encode()
    if streamed:
        data = json.dumps({"type": "response.output_item.done", "item": item})
        reply = f"event: response.output_item.done\ndata: {data}\n\n".encode()
    sealed = requests.seal_reasoning(reply, streamed=streamed)
    fields = json.loads(sealed.partition(b"data: ")[2] if streamed else sealed)
    back = fields["item"] if streamed else fields["output"][0]
    assert "hé" not in back["encrypted_content"]
    back = {**back, "content": None, "summary": []}
    found = prepare({"input": [back]}, RESPONSES).fields["input"][0]
    assert found["content"] == item["content"]
    assert "encrypted_content" not in found


@pytest.mark.parametrize("sealed", ["ENC_000231f89f8d", base64.b64encode(b"other").decode(), "é"])
def test_r20_foreign_encrypted_reasoning_is_left_out(sealed: str) -> None:
    item = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": sealed}
    found = prepare({"input": [item]}, RESPONSES)
    assert "encrypted_content" not in found.fields["input"][0]
    assert "content" not in found.fields["input"][0]


def turn(
    request: dict[str, Any], response_id: str, text: str, streamed: bool
) -> tuple[bytes, bytes]:
    item = {"type": "message", "role": "assistant", "content": text}
    reply = {"id": response_id, "output": [item]}
    body = json.dumps(reply)
    if streamed:
        body = f'event: response.completed\ndata: {{"response": {body}}}\n\n'
    return json.dumps(request).encode(), body.encode()


@pytest.mark.parametrize("streamed", [False, True])
def test_r22_previous_response_id_brings_the_whole_conversation(streamed: bool) -> None:
    recorded = [
        turn({"input": "one"}, "resp_1", "ONE", streamed),
        turn({"input": [{"role": "user", "content": "two"}], "previous_response_id": "resp_1"},
             "resp_2", "TWO", streamed),
    ]  # fmt: skip
    fields = {"input": "three", "previous_response_id": "resp_2"}
    found = requests.with_conversation(fields, recorded)["input"]
    assert [item["content"] for item in found] == ["one", "ONE", "two", "TWO", "three"]
    with pytest.raises(KeyError, match="resp_9"):
        requests.with_conversation({"previous_response_id": "resp_9"}, recorded)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"1", b"\xff\xfe", b'"' * 9, b"[" * 100_000])
def test_a_body_that_is_no_object_is_told_so(body: bytes) -> None:
    with pytest.raises(ValueError, match="must be a JSON object"):
        requests.decode(body)
