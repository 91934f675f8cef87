"""Rollouts become groups; the machinery's failures are run again and never become a reward."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_ray.collect import Collector
from lightning_ray.config import Config
from lightning_ray.errors import ConfigError, RecordError
from lightning_ray.harness.runner import RunResult
from lightning_ray.schema import Rollout
from lightning_ray.store import Store, read_trajectories
from tests.test_store import exchange


class Local:
    """An object with the calling convention of an actor handle."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return type("Method", (), {"remote": staticmethod(lambda *a, **k: method(*a, **k))})


class FakeRunner:
    """Makes one call through the store, then ends as the test says."""

    def __init__(self, store: Store, ending: Callable[[Rollout], Any], calls: int = 1) -> None:
        self.store, self.ending, self.calls = store, ending, calls
        self.runs: list[Rollout] = []

    async def run(self, rollout: Rollout, base_url: str, api_key: str) -> RunResult:
        assert base_url.endswith(f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt}")
        self.runs.append(rollout)
        for _ in range(self.calls):
            await self.store.append(
                exchange([1, 2], [3], b"{}", rollout_id=rollout.rollout_id, attempt=rollout.attempt)
            )
        result = self.ending(rollout)
        if asyncio.iscoroutine(result):
            result = await result
        if isinstance(result, Exception):
            raise result
        return result


def tasks() -> list[dict[str, Any]]:
    return [{"question": str(n)} for n in range(5)]


def make(tmp_path: Path, ending: Callable[[Rollout], Any], **options: Any) -> Any:
    calls = options.pop("calls", 1)
    config = Config.model_validate(
        {
            "name": "t", "model": {"path": "m"},
            "harness": {"recipe": "r", "grader": "g:g"},
            "tasks": {"train": "tests.test_collect:tasks", "validate": "tests.test_collect:tasks"},
            "collect": {"groups": 2, "group_size": 2, "max_attempts": 2} | options,
        }
    )  # fmt: skip
    store = Store(str(tmp_path))
    runner = FakeRunner(store, ending, calls)
    collector = Collector(
        config, root=str(Path.cwd()), runners=[Local(runner)], store=Local(store),
        base_url="http://gateway", secret="s",
    )  # fmt: skip
    return collector, runner, store


def ok(reward: float | None = 1.0) -> RunResult:
    return RunResult(kind="ok", exit_code=0, reward=reward)


async def test_a_step_is_whole_groups_and_the_same_again_when_asked_again(tmp_path: Path) -> None:
    collector, runner, _ = make(tmp_path, lambda r: ok())
    groups = await collector.collect(0)
    assert [len(group.trajectories) for group in groups] == [2, 2]
    assert len({t.rollout.group_id for g in groups for t in g.trajectories}) == 2
    assert await collector.collect(0) is groups
    assert len(runner.runs) == 4
    assert (await collector.collect(1)) is not groups
    outcomes = [t.outcome for t in read_trajectories(tmp_path)]
    assert [o.reward for o in outcomes if o] == [1.0] * 8


@pytest.mark.parametrize("kind", ["harness_crash", "infra"])
async def test_a_failure_of_the_machinery_is_run_again_and_then_masked(
    tmp_path: Path, kind: Any
) -> None:
    failed = RunResult(kind=kind, message="broke", reward=1.0)
    collector, runner, _ = make(tmp_path, lambda r: failed)
    groups = await collector.collect(0)
    assert len(runner.runs) == 8
    for trajectory in groups[0].trajectories:
        assert (trajectory.outcome.kind, trajectory.outcome.reward) == (kind, None)
        assert trajectory.rollout.attempt == 1
    assert [len(t.events) for t in read_trajectories(tmp_path)] == [1] * 4


async def test_a_second_attempt_that_works_counts_alone(tmp_path: Path) -> None:
    crash = RunResult(kind="harness_crash", message="exit 1")
    collector, _, _ = make(tmp_path, lambda r: ok(0.5) if r.attempt else crash)
    (group, _) = await collector.collect(0)
    for trajectory in group.trajectories:
        assert (trajectory.outcome.kind, trajectory.outcome.reward) == ("ok", 0.5)
        assert [call.attempt for call in trajectory.calls] == [1]


async def test_a_runner_that_dies_is_data_and_not_the_end(tmp_path: Path) -> None:
    collector, _, _ = make(tmp_path, lambda r: ok() if r.attempt else OSError("gone"))
    groups = await collector.collect(0)
    assert all(t.outcome.kind == "ok" for g in groups for t in g.trajectories)


async def test_a_harness_that_never_calls_the_model_earns_nothing_and_is_named(
    tmp_path: Path,
) -> None:
    collector, _, _ = make(tmp_path, lambda r: ok(1.0), calls=0)
    (group, _) = await collector.collect(0)
    outcome = group.trajectories[0].outcome
    assert (outcome.kind, outcome.reward) == ("harness_crash", None)
    assert "without a call to the model" in outcome.message


@pytest.mark.parametrize(
    ("kind", "reward", "expected"),
    [
        ("agent_failed", None, 0.0),
        ("agent_failed", 0.25, 0.25),
        ("timeout", None, None),
        ("ok", None, None),
    ],
)
async def test_only_what_the_agent_did_earns_a_reward(
    tmp_path: Path, kind: Any, reward: float | None, expected: float | None
) -> None:
    collector, _, _ = make(tmp_path, lambda r: RunResult(kind=kind, reward=reward))
    (group, _) = await collector.collect(0)
    assert group.trajectories[0].outcome.reward == expected


async def test_late_groups_carry_over_and_the_oldest_come_first(tmp_path: Path) -> None:
    release = asyncio.Event()
    slow: set[str] = set()

    def ending(rollout: Rollout) -> Any:
        if not slow or rollout.group_id in slow:
            slow.add(rollout.group_id)  # the first group of the run is the slow one

            async def later() -> RunResult:
                await release.wait()
                return ok()

            return later()
        return ok()

    collector, _, _ = make(tmp_path, ending, window=4)
    first = await collector.collect(0)
    assert slow.isdisjoint(t.rollout.group_id for g in first for t in g.trajectories)
    release.set()
    await asyncio.sleep(0.1)
    second = await collector.collect(1)
    assert second[0].trajectories[0].rollout.group_id in slow
    assert second[0].step == 0


async def test_validation_runs_every_task_once_and_counts_the_unscored_apart(
    tmp_path: Path,
) -> None:
    collector, _, _ = make(
        tmp_path, lambda r: ok(1.0) if r.task.task_id != "validate/0" else ok(None)
    )
    metrics = await collector.validate(0)
    assert metrics["validation/reward"] == 1.0
    assert (metrics["validation/num"], metrics["validation/num_scored"]) == (5.0, 4.0)
    assert not math.isnan(metrics["validation/num_calls"])


async def test_a_fault_of_ours_ends_the_step_with_its_own_words(tmp_path: Path) -> None:
    collector, _, _ = make(tmp_path, lambda r: ConfigError("the recipe does not fit the task"))
    with pytest.raises(ConfigError, match="does not fit"):
        await collector.collect(0)
    collector, _, _ = make(tmp_path / "b", lambda r: RecordError("disk full"))
    with pytest.raises(RecordError, match="disk full"):
        await collector.collect(0)


def test_a_failure_of_the_machinery_cannot_be_configured_into_a_reward() -> None:
    with pytest.raises(ValueError, match="never becomes a reward"):
        Config.model_validate(
            {"name": "t", "model": {"path": "m"}, "collect": {"treat": {"infra": "score"}}}
        )
