"""Made records of finished rollouts."""

from __future__ import annotations

import numpy as np

from lightning_ray.schema import Call, Outcome, Rollout, Task, Trajectory


def call(prompt: list[int], sampled: list[int], index: int = 0, *, rollout_id: str = "r") -> Call:
    return Call(
        call_id=f"{rollout_id}-{index}", rollout_id=rollout_id, attempt=0, index=index,
        dialect="chat", status=200, error=None, prompt_ids=np.array(prompt, np.int32),
        sampled_ids=np.array(sampled, np.int32), logprobs=-np.array(sampled, np.float32),
        versions=np.full(len(sampled), index, np.int32), finish_reason="stop",
        started_at=float(index), duration_s=1.0, request=b"", response=b"",
    )  # fmt: skip


def trajectory(
    rollout_id: str = "r", *, group_id: str = "g", num_calls: int = 1, reward: float | None = 1.0
) -> Trajectory:
    """Turns of three tokens, each after the last and one token from the environment."""
    calls, prompt = [], [1, 2]
    for index in range(num_calls):
        sampled = [10 + index, 20 + index, 30 + index]
        calls.append(call(prompt, sampled, index, rollout_id=rollout_id))
        prompt = [*prompt, *sampled, 5]
    task = Task(task_id="t", data_json="{}")
    return Trajectory(
        rollout=Rollout(rollout_id=rollout_id, group_id=group_id, task=task, mode="train", step=0,
                        attempt=0),
        calls=tuple(calls), events=(),
        outcome=Outcome(rollout_id=rollout_id, attempt=0, group_id=group_id, kind="ok",
                        reward=reward, message="", num_calls=num_calls, started_at=0.0,
                        queued_s=0.0, running_s=1.0),
    )  # fmt: skip
