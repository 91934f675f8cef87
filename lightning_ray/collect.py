"""Tasks -> rollouts -> finished groups. What is late is carried over; a bad rollout is data.

Only the collector decides what runs next, when it is run again, and how it ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning_ray.assemble import assemble_on_ray
from lightning_ray.config import Config, load_function
from lightning_ray.errors import ConfigError, RecordError
from lightning_ray.gateway.keys import Claims, sign
from lightning_ray.harness.runner import RunResult
from lightning_ray.metrics import reward_of
from lightning_ray.schema import Call, Event, Mode, Outcome, Rollout, Task, Trajectory

log = logging.getLogger(__name__)

_GRACE_S = 60.0  # between a harness's deadline and its key's end
_EARNED = ("agent_failed", "timeout", "context_overflow")


@dataclass(frozen=True)
class Group:
    """The finished rollouts of one task in one step; bodies of their calls are left out."""

    step: int
    trajectories: tuple[Trajectory, ...]


class Collector:
    """Keeps `collect.window` groups running and hands out `collect.groups` at a time; an actor."""

    def __init__(
        self,
        config: Config,
        *,
        root: str,
        runners: Sequence[Any],
        store: Any,
        base_url: str,
        secret: str,
    ) -> None:
        assert config.harness is not None
        assert config.tasks is not None
        self.config = config
        self.harness = config.harness
        self.runners = list(runners)
        self.store = store
        self.base_url = base_url
        self.secret = secret
        self._train_tasks = load_tasks(config.tasks.train, root=root)
        size = config.collect.validation_size
        self._validation_tasks = load_tasks(config.tasks.validate_, root=root)[:size]
        self._load = [0] * len(self.runners)
        self._slots = asyncio.Semaphore(len(self.runners) * self.harness.slots)
        self._running: list[asyncio.Task[Group]] = []
        self._collected: dict[int, list[Group]] = {}
        self._assembled: dict[int, asyncio.Future[list[Any]]] = {}
        self._num_started = 0

    async def collect(self, step: int) -> list[Group]:
        """The groups of a training step, oldest first; the same again when asked again."""
        if step not in self._collected:
            groups = await self._next_groups(step)
            released = [t.rollout.rollout_id for g in groups for t in g.trajectories]
            await self.store.release.remote(released)
            self._collected = {step: groups}
        return self._collected[step]

    async def samples(self, step: int) -> list[Any]:
        """Of the scored rollouts of a collected step, made once by Ray Data; refs of tables."""
        if step not in self._assembled:
            groups = self._collected[step]
            scored = [t for g in groups for t in g.trajectories if reward_of(t) is not None]
            work = asyncio.to_thread(
                assemble_on_ray, scored, settings=self.config.train, where=self.config.collect
            )
            self._assembled = {step: asyncio.ensure_future(work)}
        limit = self.config.collect.assemble_timeout_s
        try:
            return await asyncio.wait_for(asyncio.shield(self._assembled[step]), limit)
        except TimeoutError:
            raise ConfigError(
                f"Ray Data has not made the samples of step {step} within {limit:.0f} s "
                "(collect.assemble_timeout_s); it needs a whole CPU that nothing else holds on a "
                f"node with the labels {self.config.collect.assemble_labels}: see `ray status`"
            ) from None

    async def validate(self, step: int) -> dict[str, float]:
        """Every validation task once: mean reward of the scored, and how many were."""
        runs = [
            self._run_group(Task(task_id=f"validate/{index}", data_json=json.dumps(data)), step,
                            mode="validate", size=1)
            for index, data in enumerate(self._validation_tasks)
        ]  # fmt: skip
        groups = await asyncio.gather(*runs)
        outcomes = [t.outcome for g in groups for t in g.trajectories if t.outcome]
        rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
        await self.store.release.remote([outcome.rollout_id for outcome in outcomes])
        return {
            "validation/reward": sum(rewards) / len(rewards) if rewards else float("nan"),
            "validation/num": float(len(outcomes)),
            "validation/num_scored": float(len(rewards)),
            "validation/num_calls": float(sum(outcome.num_calls for outcome in outcomes)),
        }

    async def _next_groups(self, step: int) -> list[Group]:
        wanted = self.config.collect.groups
        while True:
            self._top_up(step)
            done = [run for run in self._running if run.done()]
            for run in done:
                run.result()  # a fault of ours or of the store ends the step
            if len(done) >= wanted:
                break
            waiting = [run for run in self._running if not run.done()]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        taken = done[:wanted]
        self._running = [run for run in self._running if run not in taken]
        return [run.result() for run in taken]

    def _top_up(self, step: int) -> None:
        """Start groups up to the window, unless the oldest has fallen too far behind."""
        window = self.config.collect.window or self.config.collect.groups
        ages = [step - int(run.get_name()) for run in self._running if not run.done()]
        if max(ages, default=0) > self.config.collect.max_age:
            return
        while len(self._running) < window:
            groups = self._run_group(
                self._next_task(), step, mode="train", size=self.config.collect.group_size
            )
            run = asyncio.create_task(groups, name=str(step))
            # a fault is raised by the step that meets it; the same fault elsewhere is not news
            run.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._running.append(run)

    def _next_task(self) -> Task:
        """Tasks in an order shuffled anew for each pass, by the run's seed."""
        num_passes, position = divmod(self._num_started, len(self._train_tasks))
        order = list(range(len(self._train_tasks)))
        random.Random(f"{self.config.seed}/{num_passes}").shuffle(order)
        self._num_started += 1
        index = order[position]
        return Task(task_id=f"train/{index}", data_json=json.dumps(self._train_tasks[index]))

    async def _run_group(self, task: Task, step: int, *, mode: Mode, size: int) -> Group:
        group_id = uuid.uuid4().hex[:12]
        runs = [self._run_rollout(task, step, mode, group_id, index) for index in range(size)]
        return Group(step, tuple(await asyncio.gather(*runs)))

    async def _run_rollout(
        self, task: Task, step: int, mode: Mode, group_id: str, index: int
    ) -> Trajectory:
        """One rollout to its outcome, run again while the machinery is at fault."""
        asked_at = time.time()
        last = self.config.collect.max_attempts - 1
        for attempt in range(last + 1):
            rollout = Rollout(rollout_id=f"{group_id}-{index}", group_id=group_id, task=task,
                              mode=mode, step=step, attempt=attempt)  # fmt: skip
            async with self._slots:
                started_at = time.time()
                await self.store.begin.remote(rollout)
                result = await self._attempt(rollout)
            calls: list[Call] = await self.store.calls.remote(rollout.rollout_id, attempt)
            result = _judge(result, calls)
            treatment = self.config.collect.treat.get(result.kind, "mask")
            if treatment != "retry" or attempt == last:
                break
            await self.store.note.remote(_event(rollout, "attempt_failed", result.message))
        outcome = Outcome(
            rollout_id=rollout.rollout_id, attempt=attempt, group_id=group_id, kind=result.kind,
            reward=_reward(result) if treatment == "score" else None, message=result.message,
            num_calls=len(calls), started_at=started_at, queued_s=started_at - asked_at,
            running_s=result.running_s,
        )  # fmt: skip
        await self.store.finish.remote(outcome)
        log.info("rollout %s: %s reward=%s calls=%d %s", rollout.rollout_id, outcome.kind,
                 outcome.reward, len(calls), outcome.message)  # fmt: skip
        return Trajectory(rollout=rollout, calls=tuple(calls), events=(), outcome=outcome)

    async def _attempt(self, rollout: Rollout) -> RunResult:
        """The runner's verdict; whatever goes wrong with the machinery becomes one too."""
        index = min(range(len(self.runners)), key=self._load.__getitem__)
        expires_at = time.time() + self.harness.timeout_s + self.config.gateway.hold_s + _GRACE_S
        claims = Claims(rollout.rollout_id, rollout.attempt, rollout.mode, expires_at)
        base_url = f"{self.base_url}/rollout/{rollout.rollout_id}/attempt/{rollout.attempt}"
        self._load[index] += 1
        try:
            result: RunResult = await self.runners[index].run.remote(
                rollout, base_url, sign(claims, secret=self.secret)
            )
            return result
        except (ConfigError, RecordError):
            raise
        except Exception as error:  # noqa: BLE001  a failed rollout is data, and this is the place
            return RunResult(
                kind="infra", message=f"runner {index}: {type(error).__name__}: {error}"
            )
        finally:
            self._load[index] -= 1


def load_tasks(spec: str, *, root: str) -> list[dict[str, Any]]:
    """The tasks of `module:function`; ConfigError when they are none or no JSON objects."""
    tasks = load_function(spec, root=root)()
    if not (isinstance(tasks, list) and tasks and all(isinstance(task, dict) for task in tasks)):
        raise ConfigError(
            f"`{spec}` must return a list of JSON objects, at least one; got {type(tasks).__name__}"
        )
    return tasks


def _judge(result: RunResult, calls: Sequence[Call]) -> RunResult:
    """The runner's verdict in the light of the recorded calls."""
    if result.kind in ("ok", "agent_failed") and not calls:
        message = (
            "the harness ended without a call to the model; is its base URL set by the recipe?"
        )
        return replace(result, kind="harness_crash", reward=None, message=message)
    if result.kind == "harness_crash" and calls and _overflowed(calls[-1]):
        return replace(result, kind="context_overflow", message=calls[-1].error or "")
    return result


def _overflowed(call: Call) -> bool:
    return call.status == 400 and "context length" in (call.error or "")


def _reward(result: RunResult) -> float | None:
    """What the agent earned; an agent that failed and was not graded earned nothing."""
    if result.reward is None and result.kind in _EARNED:
        return 0.0
    return result.reward


def _event(rollout: Rollout, kind: str, message: str) -> Event:
    return Event(rollout_id=rollout.rollout_id, attempt=rollout.attempt, at=time.time(), kind=kind,
                 data_json=json.dumps({"message": message}))  # fmt: skip
