"""Real clients, real gateway, real vLLM: every call is recorded as the engine saw it."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest
import ray

from lightning_ray.gateway.keys import Claims, sign
from lightning_ray.schema import Call, Mode, Rollout, Task
from lightning_ray.store import read_trajectories
from tests.conftest import Stack

pytestmark = pytest.mark.heavy

TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
}


class Seat:
    """One rollout's base URL and key."""

    def __init__(self, stack: Stack, mode: Mode = "train") -> None:
        self.rollout = Rollout(
            rollout_id=uuid.uuid4().hex[:12], group_id="g", mode=mode, step=0, attempt=0,
            task=Task(task_id="t", data_json="{}"),
        )  # fmt: skip
        ray.get(stack.parts.store.begin.remote(self.rollout))
        self.base_url = f"{stack.parts.base_url}/rollout/{self.rollout.rollout_id}/attempt/0"
        claims = Claims(self.rollout.rollout_id, 0, mode, time.time() + 600)
        self.key = sign(claims, secret=stack.parts.secret)
        self.folder = stack.config.run_dir / "store"

    def calls(self) -> tuple[Call, ...]:
        (trajectory,) = [
            t for t in read_trajectories(self.folder) if t.rollout == self.rollout
        ]  # fmt: skip
        return trajectory.calls

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=self.key, max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.base_url, api_key=self.key, max_retries=0)


def chat(seat: Seat) -> int:
    reply = seat.openai.chat.completions.create(
        model="anything", messages=[{"role": "user", "content": "héllo"}], max_tokens=9,
        tools=[{"type": "function", "function": TOOL}],
    )  # fmt: skip
    assert reply.usage is not None
    return reply.usage.completion_tokens


def chat_streamed(seat: Seat) -> int:
    stream = seat.openai.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": "hello"}], max_tokens=9, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    last = list(stream)[-1]
    assert last.usage is not None
    return last.usage.completion_tokens


def responses(seat: Seat) -> int:
    reply = seat.openai.responses.create(model="x", input="hello", max_output_tokens=9)
    assert reply.usage is not None
    return reply.usage.output_tokens


def responses_streamed(seat: Seat) -> int:
    with seat.openai.responses.stream(model="x", input="hello", max_output_tokens=9) as stream:
        kinds = [event.type for event in stream]
        reply = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert reply.usage is not None
    return reply.usage.output_tokens


def messages(seat: Seat) -> int:
    reply = seat.anthropic.messages.create(
        model="claude", max_tokens=9, system="Be brief.",
        messages=[{"role": "user", "content": "hello"}],
        tools=[{"name": "add", "description": "Adds.", "input_schema": TOOL["parameters"]}],
    )  # fmt: skip
    return reply.usage.output_tokens


def messages_streamed(seat: Seat) -> int:
    with seat.anthropic.messages.stream(
        model="claude", max_tokens=9, messages=[{"role": "user", "content": "hello"}]
    ) as stream:
        return stream.get_final_message().usage.output_tokens


def completions(seat: Seat) -> int:
    reply = seat.openai.completions.create(model="x", prompt="hello", max_tokens=9)
    assert reply.usage is not None
    return reply.usage.completion_tokens


DIALECTS = [
    chat, chat_streamed, responses, responses_streamed, messages, messages_streamed, completions,
]  # fmt: skip


@pytest.mark.parametrize("send", DIALECTS, ids=lambda send: send.__name__)
def test_r9_r16_every_dialect_is_recorded_as_the_engine_saw_it_and_usage_is_true(
    stack: Stack, send: Callable[[Seat], int]
) -> None:
    seat = Seat(stack)
    num_tokens = send(seat)
    (call,) = seat.calls()
    assert call.dialect == send.__name__.removesuffix("_streamed")
    assert len(call.sampled_ids) == num_tokens
    assert 0 < num_tokens <= 9
    assert len(call.logprobs) == len(call.versions) == num_tokens
    assert (call.logprobs < 0).all()
    assert set(call.versions.tolist()) == {0}
    assert call.finish_reason == ("length" if num_tokens == 9 else "stop")
    assert_witnessed(stack, call)


def assert_witnessed(stack: Stack, call: Call) -> None:
    """The sampler's own view has the very prompt and tokens of the record."""
    Seat(stack, "serve").openai.completions.create(model="x", prompt="flush", max_tokens=1)
    seen = [json.loads(line) for line in stack.witness.read_text().splitlines()]
    recorded = {"prompt": call.prompt_ids.tolist(), "output": call.sampled_ids.tolist()}
    assert any(
        entry["prompt"] == recorded["prompt"] and entry["output"][: len(recorded["output"])]
        == recorded["output"]
        for entry in seen
    )  # fmt: skip


def test_the_rollouts_sampling_wins_over_what_the_harness_asks_for(stack: Stack) -> None:
    seat = Seat(stack)
    for _ in range(2):
        seat.openai.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "hi"}], temperature=0, seed=1, n=3,
            max_tokens=900_000,
        )  # fmt: skip
    first, second = seat.calls()
    assert len(first.sampled_ids) <= 600  # collect.sampling; 900,000 exceed the context
    assert first.sampled_ids.tolist() != second.sampled_ids.tolist()


def test_no_grammar_or_bias_bends_what_is_trained(stack: Stack) -> None:
    seat, schema = Seat(stack), {"type": "object", "properties": {"a": {"type": "integer"}}}
    strict = {**TOOL, "strict": True, "parameters": {**schema, "additionalProperties": False}}
    for extra in (
        {"response_format": {"type": "json_object"}},
        {"tools": [{"type": "function", "function": strict}], "tool_choice": "required"},
        {"logit_bias": {"70": 100}, "min_tokens": 5, "allowed_token_ids": [70]},
        {"structured_outputs": {"regex": "a+"}},
    ):
        seat.openai.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "hi"}], max_tokens=6,
            extra_body=extra,
        )  # fmt: skip
    for call in seat.calls():
        assert call.status == 200
        assert_witnessed(stack, call)
        assert (call.logprobs < 0).all()  # under a grammar many tokens are the only ones: 0.0
    said = {tuple(call.sampled_ids.tolist()) for call in seat.calls()}
    assert (70,) * 6 not in said


def test_a_served_client_keeps_its_own_sampling(stack: Stack) -> None:
    seat = Seat(stack, "serve")
    for _ in range(2):
        seat.openai.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=5
        )
    first, second = seat.calls()
    assert first.sampled_ids.tolist() == second.sampled_ids.tolist()


def test_a_prompt_beyond_the_context_is_told_in_the_dialect(stack: Stack) -> None:
    seat = Seat(stack)
    with pytest.raises(openai.BadRequestError, match="context"):
        seat.openai.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "x" * 140_000}]
        )
    with pytest.raises(anthropic.BadRequestError):
        seat.anthropic.messages.create(
            model="x", max_tokens=5, messages=[{"role": "user", "content": "x" * 140_000}]
        )
    assert [call.status for call in seat.calls()] == [400, 400]
    assert [len(call.sampled_ids) for call in seat.calls()] == [0, 0]


def test_models_and_token_counts_are_answered_and_not_recorded(stack: Stack) -> None:
    seat = Seat(stack)
    assert [model.id for model in seat.openai.models.list()] == ["policy"]
    count = seat.anthropic.messages.count_tokens(
        model="x", messages=[{"role": "user", "content": "hello"}]
    )
    assert count.input_tokens > 5
    assert seat.calls() == ()


def test_an_engine_answers_only_who_knows_the_runs_secret(stack: Stack) -> None:
    (url,) = stack.parts.engine_urls
    for headers in ({}, {"x-lr-secret": Seat(stack).key}, {"authorization": "Bearer x"}):
        for path in ("v1/models", "v1/chat/completions", "metrics", "sleep"):
            assert httpx.get(f"{url}/{path}", headers=headers).status_code == 403


def test_a_call_after_the_outcome_is_refused(stack: Stack) -> None:
    from lightning_ray.schema import Outcome

    seat = Seat(stack)
    outcome = Outcome(
        rollout_id=seat.rollout.rollout_id, attempt=0, group_id="g", kind="ok", reward=1.0,
        message="", num_calls=0, started_at=0.0, queued_s=0.0, running_s=0.0,
    )  # fmt: skip
    ray.get(stack.parts.store.finish.remote(outcome))
    with pytest.raises(openai.ConflictError, match="has ended"):
        chat(seat)


def test_sleep_gives_the_kv_pages_back_and_answers_are_the_same_afterwards(stack: Stack) -> None:
    (engine,) = stack.parts.engines
    seat = Seat(stack, "serve")

    def greedy() -> Any:
        return seat.openai.completions.create(
            model="x", prompt="the same" * 20, max_tokens=8, temperature=0
        ).choices[0].text  # fmt: skip

    before = greedy()
    awake = ray.get(engine.resident_bytes.remote())
    ray.get(engine.sleep.remote())
    asleep = ray.get(engine.resident_bytes.remote())
    ray.get(engine.wake_up.remote(["weights", "kv_cache"]))
    ray.get(engine.resume.remote())
    assert greedy() == before
    assert awake - asleep > 0.8 * (256 << 20)


def test_a_running_call_is_frozen_through_sleep_and_keeps_its_tokens(stack: Stack) -> None:
    import threading

    (engine,) = stack.parts.engines
    seat = Seat(stack, "serve")
    reply: list[Any] = []
    call = threading.Thread(
        target=lambda: reply.append(
            seat.openai.completions.create(
                model="x",
                prompt="go",
                max_tokens=600,
                temperature=0,
                extra_body={"ignore_eos": True},
            )
        )
    )
    call.start()
    while not ray.get(engine.num_running.remote()):
        time.sleep(0.01)
    time.sleep(0.2)
    ray.get(engine.sleep.remote())
    assert ray.get(engine.num_running.remote()) == 1
    time.sleep(0.3)
    assert not reply
    ray.get(engine.resume.remote())
    call.join(60)
    assert reply[0].usage.completion_tokens == 600
    (recorded,) = seat.calls()
    assert len(recorded.sampled_ids) == 600


def test_show_prints_a_trajectory_its_mask_and_why_calls_do_not_join(
    stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightning_ray.cli import main

    seat = Seat(stack)
    for words in ("héllo", "hallo"):
        seat.openai.chat.completions.create(
            model="x", messages=[{"role": "user", "content": words}], max_tokens=4
        )
    asked = ["show", str(stack.config.run_dir), "--rollout", seat.rollout.rollout_id]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "sample 1:" in shown
    assert "héllo" in shown
    assert main([*asked, "--explain"]) == 0
    shown = capsys.readouterr().out
    assert "call 0  main    version [0]  first  (its answer never came back)" in shown
    assert "parts from call 0 after" in shown
    assert "was 'éllo" in shown
    assert "is  'allo" in shown


async def test_r7_a_client_that_stays_away_leaves_no_running_request(stack: Stack) -> None:
    seat, (engine,) = Seat(stack, "serve"), stack.parts.engines
    async with httpx.AsyncClient(timeout=2.0) as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                f"{seat.base_url}/v1/completions", headers={"x-api-key": seat.key},
                json={"prompt": "x", "max_tokens": 100_000, "ignore_eos": True},
            )  # fmt: skip
    assert ray.get(engine.num_running.remote()) == 1  # it may ask again
    deadline = time.monotonic() + 60
    while ray.get(engine.num_running.remote()) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    assert ray.get(engine.num_running.remote()) == 0
    assert seat.calls() == ()


@pytest.mark.timeout(200)
def test_a_gateway_replica_that_is_killed_loses_no_call_and_samples_none_twice(
    stack: Stack,
) -> None:
    seat = Seat(stack, "serve")
    client = openai.OpenAI(base_url=f"{seat.base_url}/v1", api_key=seat.key, max_retries=30)
    prompt = f"killed {uuid.uuid4().hex}"
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(
            client.completions.create, model="x", prompt=prompt, max_tokens=900,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        time.sleep(1.0)
        kill_replica()
        reply = asking.result(timeout=150)
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 900
    (call,) = seat.calls()
    assert len(call.sampled_ids) == 900
    assert_witnessed(stack, call)
    seen = [json.loads(line)["prompt"] for line in stack.witness.read_text().splitlines()]
    assert seen.count(call.prompt_ids.tolist()) == 1


def kill_replica() -> None:
    """End the gateway's one replica as a crash would."""
    (replica,) = [
        actor for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["name"].startswith("SERVE_REPLICA::lightning-ray#gateway#")
    ]  # fmt: skip
    ray.kill(ray.get_actor(replica["name"], namespace=replica["namespace"]))
