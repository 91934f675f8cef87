"""What is logged, and where to: a flat dict of floats for each step, `part/name_unit`."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from lightning_ray.config import Config
from lightning_ray.samples import discarded
from lightning_ray.schema import Sample, Trajectory

Metrics = dict[str, float]


@contextmanager
def timed(metrics: Metrics, name: str) -> Iterator[None]:
    """Add the block's wall seconds to `time/<name>_s`."""
    started_at = time.perf_counter()
    try:
        yield
    finally:
        key = f"time/{name}_s"
        metrics[key] = metrics.get(key, 0.0) + time.perf_counter() - started_at


def summarise(groups: Sequence[Sequence[Trajectory]], samples: Sequence[Sample]) -> Metrics:
    """What a step's rollouts and samples look like; groups hold finished trajectories."""
    trajectories = [trajectory for group in groups for trajectory in group]
    rewards = [[r for r in map(reward_of, group) if r is not None] for group in groups]
    scored = [reward for group in rewards for reward in group]
    kinds = Counter(t.outcome.kind for t in trajectories if t.outcome)
    calls = [call for t in trajectories for call in t.calls]
    sampled = [len(call.sampled_ids) for call in calls]
    metrics = {
        "rollout/reward_mean": _mean(scored),
        "rollout/reward_std": float(np.std(scored)) if scored else float("nan"),
        "rollout/group_reward_std_mean": _mean([float(np.std(g)) for g in rewards if g]),
        "rollout/mixed_groups_share": _mean([len(set(group)) > 1 for group in rewards]),
        "rollout/num": len(trajectories),
        "rollout/num_scored": len(scored),
        "rollout/num_without_samples": len(scored) - len({s.rollout_id for s in samples}),
        "rollout/num_lone": sum(len(group) == 1 for group in rewards),
        "rollout/running_s_mean": _mean([t.outcome.running_s for t in trajectories if t.outcome]),
        "call/num": len(calls),
        "call/duration_s_mean": _mean([call.duration_s for call in calls]),
        "call/num_per_rollout": len(calls) / max(len(trajectories), 1),
        "call/num_sampled_tokens": sum(sampled),
        "call/num_prompt_tokens": sum(len(call.prompt_ids) for call in calls),
        "call/num_failed": sum(call.status >= 400 for call in calls),
        "call/num_discarded": sum(len(discarded(t.calls)) for t in trajectories),
        "sample/num": len(samples),
        "sample/num_per_rollout": len(samples) / max(len({s.rollout_id for s in samples}), 1),
    }
    joins = Counter(call.joined for call in calls if call.joined)
    uses = Counter(call.kind for call in calls if call.kind)
    return {
        **{name: float(value) for name, value in metrics.items()},
        **{f"rollout/num_{kind}": float(num) for kind, num in sorted(kinds.items())},
        **{f"call/num_{kind}": float(num) for kind, num in sorted(uses.items())},
        **{f"call/joined_{reason}": float(num) for reason, num in sorted(joins.items())},
    }


def reward_of(trajectory: Trajectory) -> float | None:
    """None where the rollout is not scored."""
    return trajectory.outcome.reward if trajectory.outcome else None


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


class Journal:
    """`metrics.jsonl`, and whatever else the config tracks with; written as each step ends."""

    def __init__(self, config: Config, *, is_writer: bool) -> None:
        self.path = config.run_dir / "metrics.jsonl"
        self._is_writer = is_writer
        self._trackers = [_TRACKERS[name](config) for name in config.track if is_writer]

    def write(self, step: int, version: int, metrics: Metrics) -> None:
        """The writer adds a line; all others do nothing."""
        if not self._is_writer:
            return
        line = {"step": step, "version": version, "at": time.time(), **metrics}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for tracker in self._trackers:
            tracker.write(step, metrics)

    def close(self) -> None:
        """The run has ended well."""
        for tracker in self._trackers:
            tracker.close()


class _TensorBoard:
    def __init__(self, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(config.run_dir / "tensorboard"))
        self.close = self._board.close

    def write(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()


class _Wandb:
    """Where the environment says: WANDB_MODE, WANDB_API_KEY, WANDB_PROJECT."""

    def __init__(self, config: Config) -> None:
        import wandb

        os.environ.setdefault("WANDB_PROJECT", "lightning_ray")
        settings = config.model_dump(mode="json")
        self._run = wandb.init(name=config.name, dir=str(config.run_dir), config=settings)
        self.close = self._run.finish

    def write(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)


class _MLflow:
    """To MLFLOW_TRACKING_URI, or a database in the run's folder."""

    def __init__(self, config: Config) -> None:
        import mlflow

        if "MLFLOW_TRACKING_URI" not in os.environ:
            mlflow.set_tracking_uri(f"sqlite:///{config.run_dir}/mlflow.db")
        mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "lightning_ray"))
        mlflow.start_run(run_name=config.name)
        self.close = mlflow.end_run
        self._log = mlflow.log_metrics

    def write(self, step: int, metrics: Metrics) -> None:
        self._log(metrics, step=step)


_TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb, "mlflow": _MLflow}
