"""A part that dies takes no call with it, in whatever phase of the call it dies.

Several engines and a Ray of its own; started alone, or before the tests that share a stack.
"""

from __future__ import annotations

import json
import os
import signal
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import ray

from tests.clients import nightly
from tests.conftest import Stack, make_stack
from tests.stack.test_calls import Seat, kill_replica

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900), nightly]


@pytest.fixture(scope="module")
def spare(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine more than these tests kill."""
    with make_stack(tmp_path_factory.mktemp("lost"), tiny_model, num_engines=5) as made:
        yield made


def test_a_killed_engines_calls_are_answered_by_another_and_sessions_stay_whole(
    spare: Stack,
) -> None:
    seat = Seat(spare)
    odd = '<tool_call>\n{"arguments" : {"a":  1},"name":"add"}\n</tool_call>'
    script = Path(os.environ["LR_TEST_SCRIPT"])
    script.write_text(json.dumps([{"when": "sum", "say": odd}]))
    history: list[Any] = [{"role": "user", "content": "the sum"}]
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    client = openai.OpenAI(base_url=f"{seat.base_url}/v1", api_key=seat.key, max_retries=0)

    def ask(limit: int) -> Any:
        reply = client.chat.completions.create(
            model="x", messages=history, tools=tools, max_tokens=limit
        )
        history.append(reply.choices[0].message.model_dump(exclude_none=True))
        return reply

    (called,) = ask(100).choices[0].message.tool_calls
    history.append({"role": "tool", "tool_call_id": called.id, "content": "go on"})
    script.write_text(json.dumps([{"when": "go on", "say": "0123456789" * 59}]))
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, 600)
        until(lambda: num_running(spare) == 1)
        time.sleep(0.3)
        ray.kill(engine_of(spare, seat))
        assert asking.result(timeout=120).usage.completion_tokens == 591
    first, second = seat.calls()
    assert (first.joined, second.joined) == ("first", "continued")  # read back from the store
    assert (second.status, len(second.sampled_ids)) == (200, 591)


@pytest.mark.parametrize("phase", ["waits", "is sampled", "is recorded"])
@pytest.mark.parametrize("lost", ["replica", "engine"])
def test_a_call_is_recorded_once_whatever_is_killed_while_it(
    spare: Stack, lost: str, phase: str
) -> None:
    seat, prompt = Seat(spare, "serve"), f"killed {uuid.uuid4().hex}"
    client = openai.OpenAI(base_url=f"{seat.base_url}/v1", api_key=seat.key, max_retries=30)
    with ThreadPoolExecutor() as pool, held(spare, phase):
        asking = pool.submit(
            client.completions.create, model="x", prompt=prompt, max_tokens=600,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        if phase == "waits":
            time.sleep(1.0)
        else:
            until(lambda: num_running(spare) == 1)
        if phase == "is recorded":
            with suspended(store_process()):
                until(lambda: num_running(spare) == 0)
                time.sleep(0.5)
                kill(spare, lost, seat)
                assert not asking.done()
        else:
            kill(spare, lost, seat)
    usage = asking.result(timeout=150).usage
    assert usage is not None
    assert usage.completion_tokens == 600
    (call,) = seat.calls()
    assert (call.status, len(call.sampled_ids)) == (200, 600)
    seen = [json.loads(line)["prompt"] for line in spare.witness.read_text().splitlines()]
    if (lost, phase) != ("engine", "is sampled"):  # what a dead engine had sampled is gone
        assert seen.count(call.prompt_ids.tolist()) == 1


@contextmanager
def held(stack: Stack, phase: str) -> Iterator[None]:
    """The gate is closed for the block, where the phase is to wait at it."""
    if phase == "waits":
        ray.get(stack.parts.gate.close.remote(0.0))
    yield
    ray.get(stack.parts.gate.open.remote())


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def kill(stack: Stack, lost: str, seat: Seat) -> None:
    if lost == "replica":
        kill_replica()
    else:
        ray.kill(engine_of(stack, seat))


def store_process() -> psutil.Process:
    """Where this session's store runs."""
    found = [p for p in psutil.process_iter(["cmdline"]) if "ray::Store" in p.info["cmdline"][:1]]
    return max(found, key=lambda process: process.create_time())


def living(stack: Stack) -> dict[str, Any]:
    """The engines that answer, by address."""
    found = {}
    for url, engine in zip(stack.parts.engine_urls, stack.parts.engines, strict=True):
        try:
            ray.get(engine.num_running.remote())
        except ray.exceptions.RayActorError:
            continue
        found[url] = engine
    return found


def engine_of(stack: Stack, seat: Seat) -> Any:
    """The engine that a rollout's calls go to."""
    name = seat.rollout.rollout_id
    engines = living(stack)
    return engines[min(engines, key=lambda url: zlib.crc32(f"{name}{url}".encode()))]


def num_running(stack: Stack) -> int:
    return sum(ray.get([engine.num_running.remote() for engine in living(stack).values()]))


def until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
