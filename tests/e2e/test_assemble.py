"""Samples made by Ray Data on several nodes are those made inline; others can read an export."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

from lightning_ray.config import CollectConfig, TrainConfig
from lightning_ray.schema import Outcome, Rollout, Sample, Task, from_table
from tests.made import trajectory
from tests.test_store import exchange

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes; only the second has the label."""
    from ray.cluster_utils import Cluster

    if ray.is_initialized():
        pytest.fail("this test needs a cluster of its own; it must run before or after the stack's")
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes.add_node(num_cpus=2, labels={"part": "data"})
    environment = {"env_vars": {"PYTHONPATH": os.getcwd()}}
    ray.init(address=nodes.address, runtime_env=environment, log_to_driver=False)
    yield
    ray.shutdown()
    nodes.shutdown()


def test_ray_data_makes_the_same_table_in_the_same_order(cluster: None, monkeypatch: Any) -> None:
    from lightning_ray import assemble

    monkeypatch.setattr(assemble, "_ROLLOUTS_PER_BLOCK", 5)
    made = [trajectory(f"r{i}", group_id=f"g{i // 4}", num_calls=i % 6 + 1) for i in range(23)]
    settings = TrainConfig(max_sample_tokens=20)
    expected = assemble.assemble(assemble.calls_table(made), settings=settings)
    where = CollectConfig(assemble_cpus=2, assemble_labels={"part": "data"})
    refs = assemble.assemble_on_ray(made, settings=settings, where=where)
    assert len(refs) == 5
    found = pa.concat_tables(ray.get(refs))
    assert found.equals(expected)
    assert [s.rollout_id for s in from_table(found, Sample)] == [f"r{i}" for i in range(23)]
    (none,) = ray.get(assemble.assemble_on_ray([], settings=settings, where=where))
    assert from_table(none, Sample) == []  # a step in which nothing was scored


async def write_run(folder: Path) -> None:
    """A run's store with three rollouts of two calls; one of them has not ended."""
    from lightning_ray.store import Store

    store = Store(str(folder / "store"))
    for i in range(3):
        name = f"r{i}"
        await store.begin(
            Rollout(rollout_id=name, group_id="g", task=Task(task_id=f"t{i}", data_json="{}"),
                    mode="train", step=7, attempt=0)
        )  # fmt: skip
        await store.append(exchange([1, 2], [3, i], b'{"n": 1}', rollout_id=name))
        await store.append(exchange([1, 2, 3, i, 9], [4], b'{"n": 2}', rollout_id=name))
        if i < 2:
            await store.finish(
                Outcome(rollout_id=name, attempt=0, group_id="g", kind="ok", reward=i / 2,
                        message="", num_calls=2, started_at=0.0, queued_s=0.0, running_s=1.0)
            )  # fmt: skip
    await store.close()


def test_pandas_duckdb_and_datasets_read_an_export(cluster: None, tmp_path: Path) -> None:
    import datasets
    import duckdb
    import pandas as pd

    from lightning_ray.assemble import export

    asyncio.run(write_run(tmp_path / "run"))
    for what in ("samples", "trajectories"):
        assert export(tmp_path / "run", tmp_path / what, what=what, modes=["train"]) == 2
    files = str(tmp_path / "samples" / "*.parquet")

    frame = pd.read_parquet(tmp_path / "samples").sort_values("rollout_id")
    assert frame["token_ids"].map(np.ndarray.tolist).tolist() == [
        [1, 2, 3, 0, 9, 4], [1, 2, 3, 1, 9, 4],
    ]  # fmt: skip
    assert frame["mask"].iloc[0].tolist() == [False, False, True, True, False, True]
    assert frame["reward"].tolist() == [0.0, 0.5]
    rows = duckdb.sql(
        f"select rollout_id, step, len(token_ids), len(list_filter(mask, lambda x: x)) "
        f"from '{files}' order by 1"
    ).fetchall()
    assert rows == [("r0", 7, 6, 3), ("r1", 7, 6, 3)]
    loaded = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.sort("rollout_id")["calls"][0] == [-1, -1, 0, 0, -1, 1]

    calls = duckdb.sql(
        f"select rollout_id, kind, reward, c.prompt_ids, c.request "
        f"from (select *, unnest(calls) as c from '{tmp_path / 'trajectories' / '*.parquet'}') "
        f"order by rollout_id, c.index"
    ).df()
    assert calls["request"].tolist() == ['{"n": 1}', '{"n": 2}'] * 2
    assert calls["prompt_ids"].iloc[1].tolist() == [1, 2, 3, 0, 9]
