"""The main loop. Every Ray Train worker runs it; ranks stay in step by running the same lines."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.train
from ray.train import Checkpoint

from lightning_ray.collect import Group
from lightning_ray.config import Config, TrainConfig, load_function
from lightning_ray.credit import Assign, advantages, assigned, check_signal
from lightning_ray.errors import ConfigError, WeightsError
from lightning_ray.metrics import Metrics, reward_of, summarise, timed
from lightning_ray.samples import build_samples
from lightning_ray.schema import Batch, Sample
from lightning_ray.train.batch import Credits, pack, padding_share, split_rollouts
from lightning_ray.train.policy import Policy
from lightning_ray.train.publish import Publisher

log = logging.getLogger(__name__)

MAX_BARREN_STEPS = 3
NUM_CHECKED = 16
"""Samples that are tried in two layouts before the first update."""


def train_loop(settings: dict[str, Any]) -> None:
    """Train one policy: collect, samples, credit, batch, sleep, update, publish."""
    config: Config = settings["config"]
    policy = Policy(config)
    run = _Run(config, root=settings["root"])
    publisher = Publisher(config, engines=run.engines, policy=policy, rank=run.rank)
    publisher.publish(policy.version)  # engines begin on the loaded weights
    run.open_gate()
    run.journal.write(0, policy.version, run.validate(0))

    for step in range(config.train.num_steps):
        metrics: Metrics = {}
        with timed(metrics, "collect"):
            groups = run.collect(step)
        with timed(metrics, "build"):
            samples, credits = learnable(groups, config.train, run.assign)
            parts = [
                batches for part in split_rollouts(samples, config.train.optimizer_steps)
                if (batches := run.pack(part, credits, policy.version))
            ]  # fmt: skip
        metrics |= summarise([group.trajectories for group in groups], samples)
        metrics["rollout/age_mean"] = sum(step - g.step for g in groups) / len(groups)
        metrics |= describe(credits, parts)
        run.check_signal(step, metrics, is_barren=not parts)
        if parts:
            with timed(metrics, "drain"):
                metrics["gate/num_frozen"] = run.drain()
            with timed(metrics, "sleep"):
                publisher.sleep()
            if policy.version == 0:
                with timed(metrics, "check"):
                    run.check_split(policy, samples, credits)
            with timed(metrics, "update"):
                metrics |= policy.update(parts)
            with timed(metrics, "publish"):
                metrics |= publisher.publish(policy.version)
            run.open_gate()
            run.check_gap(metrics)
        if run.is_due(step + 1, config.train.validate_every):
            metrics |= run.validate(step + 1)
        if run.is_due(step + 1, config.train.save_every):
            run.save(policy, step + 1)
        run.journal.write(step + 1, policy.version, metrics)


def learnable(
    groups: Sequence[Group], settings: TrainConfig, assign: Assign | None = None
) -> tuple[list[Sample], Credits]:
    """The samples of every scored rollout, and each such rollout's advantage."""
    samples: list[Sample] = []
    credits: dict[str, float | list[float]] = {}
    rewards = [[reward_of(t) for t in group.trajectories] for group in groups]
    for group, scored, row in zip(
        groups, rewards, advantages(rewards, estimator=settings.advantage), strict=True
    ):
        given = row if assign is None else assigned(assign, group.trajectories, row)
        for trajectory, reward, credit in zip(group.trajectories, scored, given, strict=True):
            if reward is not None:
                rollout = trajectory.rollout
                credits[rollout.rollout_id] = credit
                samples += build_samples(
                    trajectory.calls,
                    rollout_id=rollout.rollout_id,
                    group_id=rollout.group_id,
                    kinds=settings.kinds,
                )
    return samples, credits


def describe(credits: Credits, parts: Sequence[Sequence[Batch]]) -> Metrics:
    """How credit is spread, and how full this rank's rows are."""
    values = [float(np.mean(credit)) for credit in credits.values()] or [0.0]
    return {
        "credit/advantage_std": float(np.std(values)),
        "credit/zero_share": float(np.mean([value == 0.0 for value in values])),
        "sample/padding_share": padding_share([batch for part in parts for batch in part]),
    }


class _Run:
    """This rank's hold on the other parts of the run."""

    def __init__(self, config: Config, *, root: str) -> None:
        context = ray.train.get_context()
        self.config = config
        self.rank, self.num_ranks = context.get_world_rank(), context.get_world_size()
        self.collector = _await_actor("collector", timeout_s=config.engine.start_timeout_s)
        self.gate = ray.get_actor("gate")
        self.engines = [ray.get_actor(f"engine/{i}") for i in range(config.engine.count)]
        self.journal = _Journal(config.run_dir, is_writer=self.rank == 0)
        self._num_barren = 0
        hook = config.train.credit
        self.assign = load_function(hook, root=root) if hook else None

    def collect(self, step: int) -> list[Group]:
        groups: list[Group] = ray.get(self.collector.collect.remote(step))
        return groups

    def pack(
        self,
        samples: Sequence[Sample],
        credits: Credits,
        version: int,
        *,
        settings: TrainConfig | None = None,
    ) -> list[Batch]:
        """This rank's batches of one optimiser step."""
        settings = settings or self.config.train
        return pack(
            samples,
            advantages=credits,
            version=version,
            tokens_per_batch=settings.tokens_per_batch,
            settings=settings.objective,
            layout=settings.layout,
            rank=self.rank,
            num_ranks=self.num_ranks,
        )

    def check_split(self, policy: Policy, samples: Sequence[Sample], credits: Credits) -> None:
        """Try a few samples of the first step in the layout that is set, and one by one."""
        few = sorted(
            (sample for sample in samples if np.any(credits[sample.rollout_id])),
            key=lambda sample: (len(sample.token_ids), sample.rollout_id),
        )[:NUM_CHECKED]
        alone = self.config.train.model_copy(update={"layout": "padded", "tokens_per_batch": 1})
        policy.check_split(
            self.pack(few, credits, policy.version),
            self.pack(few, credits, policy.version, settings=alone),
        )

    def validate(self, step: int) -> Metrics:
        """Rank 0 asks; the answer is only logged."""
        if self.rank != 0:
            return {}
        metrics: Metrics = {}
        with timed(metrics, "validate"):
            metrics |= ray.get(self.collector.validate.remote(step))
        return metrics

    def drain(self) -> float:
        """Shut the gate; how many calls go on only after the update."""
        if self.rank != 0:
            return 0.0
        return float(ray.get(self.gate.close.remote(self.config.train.drain_s)))

    def open_gate(self) -> None:
        if self.rank == 0:
            ray.get(self.gate.open.remote())

    def is_due(self, step: int, every: int) -> bool:
        return step == self.config.train.num_steps or (every > 0 and step % every == 0)

    def save(self, policy: Policy, step: int) -> None:
        """A Hugging Face folder under `checkpoints/`, reported to Ray Train."""
        folder = self.config.run_dir / "checkpoints" / f"step-{step:06d}"
        policy.save(folder)
        checkpoint = Checkpoint.from_directory(str(folder)) if self.rank == 0 else None
        ray.train.report(
            {"step": step, "version": policy.version},
            checkpoint=checkpoint,
            checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        )

    def check_signal(self, step: int, metrics: Metrics, *, is_barren: bool) -> None:
        """Stop a run that cannot learn, and say what to change."""
        self._num_barren = self._num_barren + 1 if is_barren else 0
        if step == 0 and self.config.signal.enabled:
            check_signal(
                self.config.signal,
                reward_mean=metrics["rollout/reward_mean"],
                mixed_share=metrics["rollout/mixed_groups_share"],
            )
        if metrics["rollout/num_scored"] == 0 or self._num_barren > MAX_BARREN_STEPS:
            kinds = {k: int(v) for k, v in metrics.items() if k.startswith("rollout/num_")}
            raise ConfigError(
                f"step {step} gives nothing to learn from: {kinds}. Every rollout was masked or "
                f"every group had one reward, {self._num_barren} step(s) in a row; see "
                "`lightning-ray show` for how the rollouts ended."
            )

    def check_gap(self, metrics: Metrics) -> None:
        limit, gap = self.config.train.max_logprob_gap, metrics["train/logprob_gap_mean"]
        if limit is not None and not gap <= limit:
            raise WeightsError(
                f"engine and policy must agree on log-probs to {limit:g} on average; they differ "
                f"by {gap:.3g}. Weights, temperature or precision differ between the two."
            )


def _await_actor(name: str, *, timeout_s: float) -> Any:
    """The named actor, as soon as the driver has started it; it is the last of the run's parts."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get_actor(name)
        except ValueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


class _Journal:
    """`metrics.jsonl` and TensorBoard, written by rank 0 as each step ends."""

    def __init__(self, run_dir: Path, *, is_writer: bool) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.board: Any = None
        if is_writer:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, version: int, metrics: Metrics) -> None:
        if self.board is None:
            return
        line = {"step": step, "version": version, "at": time.time(), **metrics}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        self.board.flush()
