"""Trajectories -> samples, as one pure function on Arrow tables; Ray Data maps it over many.

A table of calls holds those of whole rollouts, a row each: the columns of `Call`, bodies empty, and
`group_id`. A table of samples has the columns of `Sample`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import ray.data

from lightning_ray.config import CollectConfig, TrainConfig
from lightning_ray.errors import RecordError
from lightning_ray.samples import build_samples, shorten
from lightning_ray.schema import (
    Call,
    Outcome,
    Rollout,
    Sample,
    Task,
    Trajectory,
    from_table,
    to_table,
)
from lightning_ray.store import read_rollout_ids, read_trajectories

_ROLLOUTS_PER_BLOCK = 64
_KEYS = "rollout_id", "attempt", "group_id"


def calls_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """Their calls, in the order of the trajectories."""
    calls = [replace(call, request=b"", response=b"") for t in trajectories for call in t.calls]
    groups = [t.rollout.group_id for t in trajectories for _ in t.calls]
    return to_table(calls, Call).append_column("group_id", pa.array(groups, pa.string()))


def assemble(calls: pa.Table, *, settings: TrainConfig) -> pa.Table:
    """The samples of a table of calls, rollout by rollout."""
    rollouts: dict[tuple[str, str], list[Call]] = defaultdict(list)
    groups = calls["group_id"].to_pylist()
    for group_id, call in zip(groups, from_table(calls.drop("group_id"), Call), strict=True):
        rollouts[call.rollout_id, group_id].append(call)
    samples: list[Sample] = []
    for (rollout_id, group_id), own in rollouts.items():
        found = build_samples(own, rollout_id=rollout_id, group_id=group_id, kinds=settings.kinds)
        if settings.max_sample_tokens is not None:
            found = shorten(found, limit=settings.max_sample_tokens, how=settings.too_long)
        samples += found
    return to_table(samples, Sample)


def assemble_on_ray(
    trajectories: Sequence[Trajectory], *, settings: TrainConfig, where: CollectConfig
) -> list[Any]:
    """The same by Ray Data's tasks, in the same order; refs of tables, one after the other.

    Blocks are whole rollouts. What is read of a table comes out of the node's object store without
    a copy, so ranks of one node share it.
    """
    refs = [
        ray.put(calls_table(trajectories[start : start + _ROLLOUTS_PER_BLOCK]))
        for start in range(0, max(len(trajectories), 1), _ROLLOUTS_PER_BLOCK)
    ]
    limits = ray.data.ExecutionResources(cpu=where.assemble_cpus)
    with _settings(
        preserve_order=True, resource_limits=limits, label_selector=where.assemble_labels or None
    ):
        found: list[Any] = (
            ray.data.from_arrow_refs(refs)
            .map_batches(
                partial(assemble, settings=settings), batch_format="pyarrow", batch_size=None
            )
            .to_arrow_refs()
        )
    return found


def export(folder: Path, out: Path, *, what: str, modes: Collection[str]) -> int:
    """Write the finished rollouts of a run as Parquet files into `out`; how many rows there are.

    folder: the run's.
    what:   `samples`: a row each, the columns of `Sample` and the rollout's `step`, `mode`,
            `task_id` and `reward`; of kinds that are trained by default.
            `trajectories`: a row for each rollout, its task and outcome, and `calls`, a list of
            structs with ids, log-probs, versions, and the bodies as text.
    """
    names = read_rollout_ids(folder / "store")
    if not names:
        raise RecordError(f"`{folder}` holds no rollout to export")
    blocks = min(-(-len(names) // _ROLLOUTS_PER_BLOCK), int(ray.cluster_resources()["CPU"]))
    rows = {"samples": _sample_rows, "trajectories": _trajectory_rows}[what]

    def read(block: pa.Table) -> pa.Table:
        found = read_trajectories(folder / "store", block["rollout_id"].to_pylist())
        return rows([t for t in found if t.outcome and t.rollout.mode in modes])

    ids = pa.table({"rollout_id": pa.array(names, pa.string())})
    with _settings(preserve_order=True):
        dataset = (
            ray.data.from_arrow(ids, override_num_blocks=blocks)
            .map_batches(read, batch_format="pyarrow", batch_size=None)
            .materialize()
        )
        num_rows: int = dataset.count()
        if not num_rows:
            raise RecordError(f"`{folder}` has no finished rollout in mode {' or '.join(modes)}")
        dataset.write_parquet(str(out))
    return num_rows


def _sample_rows(trajectories: Sequence[Trajectory]) -> pa.Table:
    table = assemble(calls_table(trajectories), settings=TrainConfig())
    of = {trajectory.rollout.rollout_id: trajectory for trajectory in trajectories}
    owners = [of[name] for name in table["rollout_id"].to_pylist()]
    return _with_columns(
        table,
        step=pa.array([t.rollout.step for t in owners], pa.int64()),
        mode=pa.array([t.rollout.mode for t in owners], pa.string()),
        task_id=pa.array([t.rollout.task.task_id for t in owners], pa.string()),
        reward=pa.array([t.outcome.reward for t in owners if t.outcome], pa.float64()),
    )


def _trajectory_rows(trajectories: Sequence[Trajectory]) -> pa.Table:
    calls = [call for t in trajectories for call in t.calls]
    own = to_table([replace(call, request=b"", response=b"") for call in calls], Call)
    own = _with_columns(
        own.drop(["rollout_id", "attempt", "request", "response"]),
        request=pa.array([call.request.decode(errors="replace") for call in calls], pa.string()),
        response=pa.array([call.response.decode(errors="replace") for call in calls], pa.string()),
    )
    ends = np.cumsum([0, *(len(t.calls) for t in trajectories)])
    structs = pa.StructArray.from_arrays(
        [column.combine_chunks() for column in own.columns], fields=list(own.schema)
    )
    tasks = to_table([t.rollout.task for t in trajectories], Task)
    rollouts = to_table([t.rollout for t in trajectories], Rollout).drop("task")
    outcomes = to_table([t.outcome for t in trajectories], Outcome)
    return _with_columns(
        rollouts,
        **{name: tasks[name] for name in tasks.column_names},
        **{name: outcomes[name] for name in outcomes.column_names if name not in _KEYS},
        calls=pa.ListArray.from_arrays(pa.array(ends, pa.int32()), structs),
    )


def _with_columns(table: pa.Table, **columns: pa.Array) -> pa.Table:
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


@contextmanager
def _settings(**options: Any) -> Iterator[None]:
    """Ray Data's execution options, for the datasets that are made inside."""
    context = ray.data.DataContext.get_current()
    before, show = context.execution_options, context.enable_progress_bars
    context.execution_options = ray.data.ExecutionOptions(**options)
    context.enable_progress_bars = False
    try:
        yield
    finally:
        context.execution_options, context.enable_progress_bars = before, show
