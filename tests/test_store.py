"""The store loses nothing acknowledged, and gives back what it was given."""

from __future__ import annotations

import asyncio
import resource
import uuid
from pathlib import Path

import numpy as np
import pytest

from lightning_ray import wire
from lightning_ray.errors import RecordError
from lightning_ray.schema import Call, Outcome, Rollout, Task, arrow_schema
from lightning_ray.store import Exchange, Store, StoredCall, _read_stream, read_trajectories


def rollout(rollout_id: str = "r1", attempt: int = 0) -> Rollout:
    return Rollout(
        rollout_id=rollout_id, group_id="g", task=Task(task_id="t", data_json="{}"),
        mode="train", step=0, attempt=attempt,
    )  # fmt: skip


def exchange(prompt: list[int], sampled: list[int], request: bytes, **changed: object) -> Exchange:
    capture = wire.Capture(
        prompt_ids=np.asarray(prompt, np.int32).tobytes(),
        sampled_ids=np.asarray(sampled, np.int32).tobytes(),
        logprobs=np.linspace(-1, 0, len(sampled), dtype=np.float32).tobytes(),
        versions=np.zeros(len(sampled), np.int32).tobytes(),
        finish_reason="stop",
    )
    fields: dict[str, object] = {
        "exchange_id": uuid.uuid4().hex, "rollout_id": "r1", "attempt": 0, "dialect": "chat",
        "kind": "main", "thread": "", "client_json": "{}", "status": 200,
        "started_at": 1.0, "duration_s": 0.5,
        "request": request, "response": b"{}", "captures": wire.encode_captures([capture]),
    }  # fmt: skip
    return Exchange(**(fields | changed))  # type: ignore[arg-type]


def outcome(rollout_id: str = "r1", reward: float | None = 1.0) -> Outcome:
    return Outcome(
        rollout_id=rollout_id, attempt=0, group_id="g", kind="ok", reward=reward, message="",
        num_calls=2, started_at=1.0, queued_s=0.0, running_s=1.0,
    )  # fmt: skip


SESSION = [
    exchange([1, 2, 3], [4, 5], b'{"messages":[A],"model":"m"}'),
    exchange([1, 2, 3, 4, 5, 6], [7], b'{"messages":[A,B,C],"model":"m"}'),
    exchange([9, 9], [8], b"title?"),
    exchange([1, 2, 3, 4, 5, 6, 7, 1], [], b'{"messages":[A,B,C,D,E],"model":"m"}'),
]


async def write_session(folder: Path) -> Store:
    store = Store(str(folder))
    await store.begin(rollout())
    for item in SESSION:
        await store.append(item)
    return store


def assert_session(calls: tuple[Call, ...]) -> None:
    for call, item in zip(calls, SESSION, strict=True):
        (capture,) = wire.decode_captures(item.captures)
        assert call.prompt_ids.tolist() == wire.ids(capture.prompt_ids).tolist()
        assert call.sampled_ids.tolist() == wire.ids(capture.sampled_ids).tolist()
        assert call.logprobs.tolist() == wire.floats(capture.logprobs).tolist()
        assert (call.request, call.response) == (item.request, item.response)


async def test_a_session_reads_back_whole_from_the_stream_and_from_parquet(tmp_path: Path) -> None:
    store = await write_session(tmp_path)
    assert_session(read_trajectories(tmp_path)[0].calls)
    await store.finish(outcome())
    await store.close()
    (trajectory,) = read_trajectories(tmp_path)
    assert_session(trajectory.calls)
    assert trajectory.outcome == outcome()
    assert list(tmp_path.glob("calls-*.parquet"))


async def test_a_call_is_stored_as_what_it_adds_to_its_parent(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    await store.begin(rollout())
    history: list[int] = []
    for turn in range(50):
        await store.append(exchange(history, [turn] * 100, b"x" * len(history)))
        history = [*history, *[turn] * 100, *[7] * 100]
    await store.close()
    stored = sum(len(c.prompt_ids) for c in (await store.calls("r1", 0)))
    import pyarrow.parquet as pq

    on_disk = pq.read_table(next(tmp_path.glob("calls-*.parquet")))["prompt_ids"]
    assert stored == 50 * 49 // 2 * 200
    assert len(on_disk.combine_chunks().flatten()) == 49 * 100


async def test_a_tail_torn_at_any_byte_loses_only_what_was_not_acknowledged(tmp_path: Path) -> None:
    source = tmp_path / "whole"
    store = Store(str(source))
    await store.begin(rollout())
    for item in SESSION[:-1]:
        await store.append(item)
    start = (source / "calls.arrows").stat().st_size
    await store.append(SESSION[-1])
    whole = (source / "calls.arrows").read_bytes()
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "rollouts.arrows").write_bytes((source / "rollouts.arrows").read_bytes())
    for cut in range(start, len(whole)):
        (torn / "calls.arrows").write_bytes(whole[:cut])
        rows = _read_stream(torn / "calls.arrows", arrow_schema(StoredCall))
        assert rows.num_rows == len(SESSION) - 1, cut
    again = Store(str(torn))  # seals what it found, and goes on after it
    await again.begin(rollout("r2"))
    first, second = read_trajectories(torn)
    assert len(first.calls) == len(SESSION) - 1
    assert second.rollout.rollout_id == "r2"


async def test_an_outcome_is_written_once_even_after_a_restart(tmp_path: Path) -> None:
    store = await write_session(tmp_path)
    await store.finish(outcome())
    with pytest.raises(RecordError, match="already has an outcome"):
        await store.finish(outcome(reward=0.0))
    with pytest.raises(RecordError, match="already has an outcome"):
        await Store(str(tmp_path)).finish(outcome(reward=0.0))
    assert read_trajectories(tmp_path)[0].outcome == outcome()


async def test_calls_of_an_ended_or_unknown_attempt_are_refused(tmp_path: Path) -> None:
    store = await write_session(tmp_path)
    await store.begin(rollout(attempt=1))
    with pytest.raises(RecordError, match="attempt 0 has ended"):
        await store.append(SESSION[0])
    with pytest.raises(RecordError, match="`nobody`"):
        await store.append(exchange([1], [2], b"", rollout_id="nobody"))
    await store.append(exchange([1], [2], b"", attempt=1))
    (trajectory,) = read_trajectories(tmp_path)
    assert (trajectory.rollout.attempt, len(trajectory.calls)) == (1, 1)


async def test_a_full_disk_is_one_clear_error_and_the_store_goes_on_after_it(
    tmp_path: Path,
) -> None:
    store = await write_session(tmp_path)
    size = (tmp_path / "calls.arrows").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 700, hard))
    try:
        with pytest.raises(RecordError, match=r"could not write to .* free space"):
            await store.append(exchange([1, 2], [3], b"y" * 5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_session(read_trajectories(tmp_path)[0].calls)
    await store.append(exchange([5], [6], b"after"))
    assert read_trajectories(tmp_path)[0].calls[-1].request == b"after"


async def test_concurrent_appends_share_commits_and_all_arrive(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    await store.begin(rollout())
    await asyncio.gather(*(store.append(exchange([n], [n], b"%d" % n)) for n in range(200)))
    (trajectory,) = read_trajectories(tmp_path)
    assert sorted(int(c.prompt_ids[0]) for c in trajectory.calls) == list(range(200))
    assert sorted(c.index for c in trajectory.calls) == list(range(200))
