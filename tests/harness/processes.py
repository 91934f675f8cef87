"""What the tests of the runner share: where the programs are, and which processes still run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_ray.schema import Rollout, Task

ROOT = Path(__file__).parents[2]
PROGRAMS = "{root}/tests/harness/programs"
BASE_URL = "http://127.0.0.1:9/rollout/r/attempt/0"


def rollout_of(**task: Any) -> Rollout:
    row = Task(task_id="t", data_json=json.dumps(task))
    return Rollout(rollout_id="r", group_id="g", task=row, mode="train", step=0, attempt=0)


async def pids_in(path: Path) -> list[int]:
    """The process ids a program writes into a file once it is up."""
    assert await comes_true(path.exists, within_s=20), f"{path} was not written"
    return [int(word) for word in path.read_text().split()]


async def are_gone(pids: list[int], *, within_s: float = 5) -> bool:
    return await comes_true(lambda: not any(map(is_running, pids)), within_s=within_s)


async def is_removed(folder: Path, *, within_s: float = 5) -> bool:
    return await comes_true(lambda: not folder.exists(), within_s=within_s)


async def comes_true(fact: Callable[[], bool], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not fact():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
