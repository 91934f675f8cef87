"""The main loop. Every Ray Train worker runs it; ranks stay in step by running the same lines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.train
from ray.train import Checkpoint

from lightning_ray.assemble import assemble, calls_table
from lightning_ray.collect import Group
from lightning_ray.config import Config, TrainConfig, load_function
from lightning_ray.credit import Assign, advantages, assigned, check_signal, dead_signal
from lightning_ray.errors import ConfigError, WeightsError
from lightning_ray.metrics import Journal, Metrics, reward_of, summarise, timed
from lightning_ray.schema import Batch, Sample, Trajectory, from_table
from lightning_ray.train.batch import Credits, num_unique, pack, padding_share, split_rollouts
from lightning_ray.train.policy import Policy
from lightning_ray.train.publish import Publisher

_ASLEEP = "sleep", "check", "update", "publish"
"""Phases of a step in which engines answer nothing."""
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
        started_at = time.perf_counter()
        with timed(metrics, "collect"):
            groups = run.collect(step)
        with timed(metrics, "build"):
            scored, credits = credited(groups, config.train, run.assign)
            samples = run.samples(step, scored, metrics)
            parts = [
                batches for part in split_rollouts(samples, config.train.optimizer_steps)
                if (batches := run.pack(part, credits, policy.version))
            ]  # fmt: skip
        metrics |= summarise([group.trajectories for group in groups], samples)
        metrics |= describe(samples, credits, parts, version=policy.version)
        ages = [step - group.step for group in groups]
        metrics |= {"rollout/age_mean": float(np.mean(ages)), "rollout/age_max": float(max(ages))}
        run.check_signal(step, metrics)
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
        metrics |= shares(metrics, wall_s=time.perf_counter() - started_at)
        if run.is_due(step + 1, config.train.validate_every):
            metrics |= run.validate(step + 1)
        if run.is_due(step + 1, config.train.save_every):
            run.save(policy, step + 1)
        run.journal.write(step + 1, policy.version, metrics)
    run.journal.close()


def credited(
    groups: Sequence[Group], settings: TrainConfig, assign: Assign | None = None
) -> tuple[list[Trajectory], Credits]:
    """The rollouts that are scored, and the advantage of each."""
    scored: list[Trajectory] = []
    credits: dict[str, float | list[float]] = {}
    rewards = [[reward_of(t) for t in group.trajectories] for group in groups]
    rows = advantages(rewards, estimator=settings.advantage)
    for group, row in zip(groups, rows, strict=True):
        given = row if assign is None else assigned(assign, group.trajectories, row)
        for trajectory, credit in zip(group.trajectories, given, strict=True):
            if reward_of(trajectory) is not None:
                credits[trajectory.rollout.rollout_id] = credit
                scored.append(trajectory)
    return scored, credits


def describe(
    samples: Sequence[Sample], credits: Credits, parts: Sequence[Sequence[Batch]], *, version: int
) -> Metrics:
    """What is trained on: tokens, their ages in versions, credit, and how full this rank's rows
    are."""
    masks = np.concatenate([sample.mask for sample in samples] or [np.zeros(0, bool)])
    sampled_by = np.concatenate([sample.versions[sample.mask] for sample in samples] or [[]])
    values = [float(np.mean(credit)) for credit in credits.values()] or [0.0]
    batches = [batch for part in parts for batch in part]
    return {
        "credit/advantage_std": float(np.std(values)),
        "credit/zero_share": float(
            np.mean([not np.any(credit) for credit in credits.values()] or [True])
        ),
        "sample/num_trained_tokens": float(masks.sum()),
        "sample/num_context_tokens": float((~masks).sum()),
        "sample/num_unique_tokens": float(num_unique(samples)),
        "sample/num_cut": float(sum(sample.is_cut for sample in samples)),
        "sample/token_age_mean": float(np.mean(version - sampled_by)) if len(sampled_by) else 0.0,
        "sample/token_age_max": float(np.max(version - sampled_by, initial=0)),
        "sample/padding_share": padding_share(batches),
    }


def shares(metrics: Metrics, *, wall_s: float) -> Metrics:
    """Of a step's wall time: how long engines were asleep, and how long ranks had no work."""
    spent = {name: metrics.get(f"time/{name}_s", 0.0) for name in (*_ASLEEP, "build")}
    asleep = sum(spent[name] for name in _ASLEEP)
    return {
        "engine/asleep_share": asleep / wall_s,
        "train/idle_share": 1.0 - (asleep + spent["build"]) / wall_s,
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
        self.journal = Journal(config, is_writer=self.rank == 0)
        self._num_barren = 0
        hook = config.train.credit
        self.assign = load_function(hook, root=root) if hook else None

    def collect(self, step: int) -> list[Group]:
        groups: list[Group] = ray.get(self.collector.collect.remote(step))
        return groups

    def samples(self, step: int, scored: Sequence[Trajectory], metrics: Metrics) -> list[Sample]:
        """Of the step's scored rollouts, made here or, where they are many, by Ray Data."""
        settings = self.config.collect
        num_tokens = sum(len(call.prompt_ids) for t in scored for call in t.calls)
        is_large = num_tokens > settings.inline_max_tokens
        metrics["sample/by_ray_data"] = float(is_large or settings.assemble == "ray_data")
        if not metrics["sample/by_ray_data"]:
            return from_table(assemble(calls_table(scored), settings=self.config.train), Sample)
        tables = ray.get(ray.get(self.collector.samples.remote(step)))
        return from_table(pa.concat_tables(tables), Sample)

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

    def check_signal(self, step: int, metrics: Metrics) -> None:
        """Stop a run that cannot learn, and say what to change."""
        if step == 0 and self.config.signal.enabled:
            check_signal(
                self.config.signal,
                reward_mean=metrics["rollout/reward_mean"],
                mixed_share=metrics["rollout/mixed_groups_share"],
            )
        reason, limit = dead_signal(metrics), self.config.signal.max_barren_steps
        self._num_barren = self._num_barren + 1 if reason else 0
        if limit is not None and self._num_barren > limit:
            raise ConfigError(
                f"step {step} gives nothing to learn from, {self._num_barren} in a row: {reason}; "
                "see `lightning-ray show` for how the rollouts ended. "
                "signal.max_barren_steps=null goes on all the same."
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
