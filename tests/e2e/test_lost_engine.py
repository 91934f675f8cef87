"""An engine that dies takes no call with it: another answers, from what the store knows.

Two engines and a Ray of its own; started alone, or before the tests that share a stack.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import ray

from lightning_ray.config import Config
from tests.clients import nightly
from tests.conftest import Stack
from tests.stack.test_calls import Seat

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600), nightly]


@pytest.fixture(scope="module")
def two_engines(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    from lightning_ray.run import started

    folder = tmp_path_factory.mktemp("two")
    os.environ["LR_TEST_WITNESS"] = str(folder / "witness.jsonl")
    os.environ["LR_TEST_SCRIPT"] = str(folder / "script.json")
    config = Config.model_validate(
        {
            "name": "two",
            "runs": str(folder),
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "engine": {
                "device": "cpu", "count": 2, "max_model_len": 4096, "kv_cache_bytes": 64 << 20,
                "args": ["--logits-processors", "tests.scripted:Scripted", "tests.witness:Witness"],
            },
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with started(config, say=lambda text: None) as parts:
            ray.get(parts.gate.open.remote())
            yield Stack(config, parts, folder / "witness.jsonl")


def test_a_killed_engines_calls_are_answered_by_another_and_sessions_stay_whole(
    two_engines: Stack,
) -> None:
    seat = Seat(two_engines)
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
    script.write_text(json.dumps([{"when": "go on", "say": "0123456789" * 60}]))
    with ThreadPoolExecutor() as pool:
        asking = pool.submit(ask, 700)
        while not (busy := [e for e in two_engines.parts.engines if running(e)]):
            time.sleep(0.02)
        time.sleep(0.3)
        ray.kill(busy[0])
        assert asking.result(timeout=120).usage.completion_tokens == 601
    first, second = seat.calls()
    assert (first.joined, second.joined) == ("first", "continued")  # read back from the store
    assert (second.status, len(second.sampled_ids)) == (200, 601)


def running(engine: Any) -> int:
    return int(ray.get(engine.num_running.remote()))
