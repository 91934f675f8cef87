"""Ray Train borrows the run's placement group, and a crash of its workers takes nothing with it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import ray

pytestmark = pytest.mark.heavy


def loop(settings: dict[str, Any]) -> None:
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    group = ray.util.get_current_placement_group()
    folder = Path(settings["folder"])
    attempt = len(list(folder.glob(f"rank-{rank}-*")))
    (folder / f"rank-{rank}-{attempt}").write_text(group.id.hex())
    if rank == 1 and attempt == 0:
        time.sleep(3)  # a crash while the group still starts is the controller's, not the workers'
        os._exit(1)


@pytest.mark.timeout(280)
def test_train_workers_come_back_in_the_same_group_beside_living_engines(tmp_path: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from lightning_ray.config import Config
    from lightning_ray.placement import ENGINE_SHARE, ColocatedTorchTrainer, make_group

    if ray.is_initialized():
        pytest.fail("this test needs a cluster of its own; it must run before or after the stack's")
    ray.init(address="local", num_cpus=3, include_dashboard=False, namespace="placement")
    try:
        config = Config.model_validate(
            {"name": "p", "model": {"path": "m"}, "engine": {"device": "cpu", "count": 2}}
        )
        group = make_group(config)

        @ray.remote(num_cpus=ENGINE_SHARE)
        class Neighbour:
            def ping(self) -> int:
                return os.getpid()

        neighbours = [
            Neighbour.options(  # type: ignore[attr-defined]
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)
            ).remote()
            for index in range(2)
        ]
        pids = ray.get([n.ping.remote() for n in neighbours])
        trainer = ColocatedTorchTrainer(
            loop,
            train_loop_config={"folder": str(tmp_path)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
            run_config=RunConfig(
                name="t", storage_path=str(tmp_path / "s"), failure_config=FailureConfig(1)
            ),
        )
        trainer.fit()
        found = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
        assert sorted(found) == ["rank-0-0", "rank-0-1", "rank-1-0", "rank-1-1"]
        assert set(found.values()) == {group.id.hex()}
        assert ray.get([n.ping.remote() for n in neighbours]) == pids
        assert ray.util.placement_group_table(group)["state"] == "CREATED"
    finally:
        ray.shutdown()
