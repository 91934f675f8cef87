"""Calls -> samples -> batches: tokens a second on one core, against lists and loops.

    python -m jobs.bench.assemble

Made rollouts of 30 turns and 20,000 tokens, as a step of training has them in memory. Both sides
make the same samples (checked); the seconds are the best of three, and tokens are those of the
samples, not of the prompts (which are fifteen times as many).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from lightning_ray.assemble import assemble, calls_table
from lightning_ray.config import TrainConfig
from lightning_ray.schema import Call, Outcome, Rollout, Sample, Task, Trajectory, from_table
from lightning_ray.train.batch import pack

TURNS, TOKENS, ANSWER = 30, 20_000, 150


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=64)
    rollouts = parser.parse_args().rollouts
    rng = np.random.default_rng(0)
    trajectories = [make(f"r{i}", f"g{i // 8}", rng) for i in range(rollouts)]
    credits = {t.rollout.rollout_id: float(rng.normal()) for t in trajectories}
    settings = TrainConfig()

    def whole(layout: str) -> int:
        table = assemble(calls_table(trajectories), settings=settings)
        samples = from_table(table, Sample)
        pack(samples, advantages=credits, version=1, tokens_per_batch=65_536, layout=layout)
        return sum(len(sample.token_ids) for sample in samples)

    def arrow() -> list[Sample]:
        return from_table(assemble(calls_table(trajectories), settings=settings), Sample)

    def lists() -> list[dict[str, list[Any]]]:
        return [row for t in trajectories for row in merge(t.calls)]

    for sample, row in zip(arrow(), lists(), strict=True):
        assert sample.token_ids.tolist() == row["token_ids"]
        assert sample.mask.tolist() == row["mask"]
    num_tokens = whole("packed")
    report = Table("what", "seconds", "million tokens/s", "ratio", title=f"{num_tokens:,} tokens")
    slow = seconds(lists)
    for name, work in (
        ("lists and loops: calls -> samples", lists),
        ("calls -> samples", arrow),
        ("calls -> samples -> batches, packed", lambda: whole("packed")),
        ("calls -> samples -> batches, tree", lambda: whole("tree")),
    ):
        spent = slow if work is lists else seconds(work)
        rate = num_tokens / spent / 1e6
        report.add_row(name, f"{spent:.2f}", f"{rate:.2f}", f"{slow / spent:.1f}")
    Console().print(report)


def make(rollout_id: str, group_id: str, rng: np.random.Generator) -> Trajectory:
    """A rollout whose every prompt is the last one, its answer, and a result."""
    whole = rng.integers(0, 150_000, TOKENS, np.int32)
    per = TOKENS // TURNS
    calls = [
        Call(
            call_id=f"{rollout_id}/{index}", rollout_id=rollout_id, attempt=0, index=index,
            dialect="chat", status=200, error=None, prompt_ids=whole[: end - ANSWER],
            sampled_ids=whole[end - ANSWER : end], finish_reason="stop", started_at=float(index),
            logprobs=-rng.random(ANSWER, np.float32), versions=np.zeros(ANSWER, np.int32),
            duration_s=1.0, request=b"", response=b"",
        )
        for index, end in enumerate(range(per, TOKENS + 1, per))
    ]  # fmt: skip
    return Trajectory(
        rollout=Rollout(rollout_id=rollout_id, group_id=group_id, mode="train", step=0, attempt=0,
                        task=Task(task_id="t", data_json="{}")),
        calls=tuple(calls), events=(),
        outcome=Outcome(rollout_id=rollout_id, attempt=0, group_id=group_id, kind="ok", reward=1.0,
                        message="", num_calls=TURNS, started_at=0.0, queued_s=0.0, running_s=1.0),
    )  # fmt: skip


def merge(calls: Sequence[Call]) -> list[dict[str, list[Any]]]:
    """The straightforward form: lists of Python numbers, compared one by one."""
    rows: list[dict[str, list[Any]]] = []
    for call in calls:
        prompt, answer = call.prompt_ids.tolist(), call.sampled_ids.tolist()
        best = None
        for row in rows:
            ids = row["token_ids"]
            if len(ids) <= len(prompt) and all(a == b for a, b in zip(ids, prompt, strict=False)):
                best = row if best is None or len(ids) > len(best["token_ids"]) else best
        if best is None:
            best = {"token_ids": [], "mask": [], "logprobs": [], "versions": []}
            rows.append(best)
        added = prompt[len(best["token_ids"]) :]
        best["token_ids"] += added + answer
        best["mask"] += [False] * len(added) + [True] * len(answer)
        best["logprobs"] += [0.0] * len(added) + call.logprobs.tolist()
        best["versions"] += [-1] * len(added) + call.versions.tolist()
    return rows


def seconds(work: Callable[[], object]) -> float:
    """The best of three."""
    found = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        found.append(time.perf_counter() - started)
    return min(found)


if __name__ == "__main__":
    main()
