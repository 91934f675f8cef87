"""Who sits where: one placement group, one bundle for each GPU, shared by an engine and a rank.

Ray Train cannot join a group by its API, so three small overrides of Ray 2.60 internals let it
borrow ours: its workers get the named group, its end does not remove the group, and its cleaner is
left out. A worker group that crashes comes back in the same bundles, engines alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import ray.train.v2.api.data_parallel_trainer as train_api
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.worker_group.placement_group_handle import (
    DefaultPlacementGroupHandle,
)
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup
from ray.util.placement_group import PlacementGroup, placement_group

from lightning_ray.config import Config
from lightning_ray.errors import ConfigError

ENGINE_SHARE = 0.4
TRAINER_SHARE = 0.5
_GROUP = "colocated"
_GROUP_TIMEOUT_S = 300.0


def make_group(config: Config) -> PlacementGroup:
    """The run's placement group, ready; ConfigError when the cluster cannot hold it."""
    num_bundles = max(config.engine.count, config.train.num_workers or 1)
    resource = "GPU" if config.engine.device == "gpu" else "CPU"
    available = ray.cluster_resources().get(resource, 0)
    if available < num_bundles:
        raise ConfigError(
            f"the run needs {num_bundles} {resource}s and the cluster has {available:.0f}. "
            + ("Set engine.device: cpu, or add GPUs." if resource == "GPU" else "Add CPUs.")
        )
    bundle = {"GPU": 1, "CPU": 1} if resource == "GPU" else {"CPU": 1}
    group = placement_group([bundle] * num_bundles, strategy="PACK", name=_GROUP)
    if not group.wait(_GROUP_TIMEOUT_S):
        raise ConfigError(
            f"the cluster could not place {num_bundles} bundles of {bundle} within "
            f"{_GROUP_TIMEOUT_S:.0f} s; something else holds its resources: see `ray status`"
        )
    return group


def engine_share(config: Config) -> dict[str, float]:
    """What an engine takes of its bundle."""
    return _share(config, ENGINE_SHARE)


class Trainer:
    """Runs Ray Train to its end; an actor, so that killing it ends the controller and every rank.

    `fit` blocks its caller for the whole run, and Ray crashes a driver that is shut down while one
    of its threads waits in it.
    """

    def fit(self, config: Config, loop: Callable[[dict[str, Any]], Any], *, root: str) -> None:
        """Run `loop` on every rank, in the run's placement group; `root`: the driver's folder."""
        is_gpu = config.engine.device == "gpu"
        ColocatedTorchTrainer(
            loop,
            train_loop_config={"config": config, "root": root},
            torch_config=TorchConfig(backend="nccl" if is_gpu else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=config.train.num_workers or config.engine.count,
                use_gpu=is_gpu,
                resources_per_worker=_share(config, TRAINER_SHARE),
            ),
            run_config=RunConfig(
                name="checkpoints",
                storage_path=str(config.run_dir),
                failure_config=FailureConfig(max_failures=0),
            ),
        ).fit()


def _share(config: Config, share: float) -> dict[str, float]:
    return {"CPU": share, "GPU": share} if config.engine.device == "gpu" else {"CPU": share}


class _BorrowedGroup(DefaultPlacementGroupHandle):
    def shutdown(self) -> None:
        """The group is the run's; Ray Train must not remove it."""


class _BorrowingWorkerGroup(WorkerGroup):
    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Any:
        return _BorrowedGroup(ray.util.get_placement_group(_GROUP))


class _BorrowingController(TrainController):
    worker_group_cls = _BorrowingWorkerGroup


class ColocatedTorchTrainer(TorchTrainer):
    """`TorchTrainer` in a placement group that exists already and outlives it."""

    def _create_default_callbacks(self) -> list[Any]:
        callbacks = super()._create_default_callbacks()
        return [c for c in callbacks if not isinstance(c, PlacementGroupCleanerCallback)]

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        # the parent looks its controller's class up by this name
        train_api.TrainController = _BorrowingController
        return super()._initialize_and_run_controller(**arguments)
