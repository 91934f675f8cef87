"""Weights from the policy to the engines, with their version, by vLLM's four-phase transfer."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lightning_ray.config import Config
from lightning_ray.engine.actor import call_all
from lightning_ray.errors import WeightsError, boundary
from lightning_ray.metrics import Metrics, timed
from lightning_ray.train.policy import Policy

BUCKET_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")


class Publisher:
    """Moves weights to every engine; each rank has one and calls it in step, rank 0 sends."""

    def __init__(
        self, config: Config, *, engines: Sequence[Any], policy: Policy, rank: int
    ) -> None:
        self.client = _Client(engines)
        self.rank = rank
        self._num_bytes = sum(d.itemsize * math.prod(shape) for _, d, shape in policy.shapes())
        if config.engine.device == "gpu":
            # heavy, and only for CUDA: vLLM's own sender
            from lightning_ray.engine.transfer import ipc_sender

            self.sender: Any = ipc_sender(
                rank=rank, client=self.client, parameters=policy.parameters, shapes=policy.shapes()
            )
        else:
            self.sender = _SharedMemorySender(policy, client=self.client, is_sender=rank == 0)

    def sleep(self) -> None:
        """Freeze what the engines still run and have them give memory back."""
        if self.rank == 0:
            self.client.call("sleep")

    def publish(self, version: int) -> Metrics:
        """Wake the engines on weights `version`; they answer with nothing else afterwards."""
        metrics: Metrics = {}
        if self.rank == 0:
            self.client.call("wake_up", ["weights"])
        self.client.version = version
        with timed(metrics, "send"):
            self.sender.send_weights()
        if self.rank == 0:
            self.client.call("wake_up", ["kv_cache"])
            self.client.call("resume")
            self.client.call("canary", version)
        return {**metrics, "publish/gb_per_s": self._num_bytes / 1e9 / metrics["time/send_s"]}


class _Client:
    """vLLM's `VLLMWeightSyncClient` over our engine actors; knows the version being sent."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.engines = engines
        self.version = 0

    def call(self, method: str, *args: Any) -> None:
        call_all(self.engines, method, *args)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", self.version)


class _SharedMemorySender:
    """The trainer's side of `SharedMemoryEngine`: whole tensors, in buckets, by path."""

    def __init__(self, policy: Policy, *, client: _Client, is_sender: bool) -> None:
        self.policy = policy
        self.client = client
        self.is_sender = is_sender

    def send_weights(self) -> None:
        """Every rank gathers; rank 0 writes and tells the engines."""
        if not self.is_sender:
            for _ in self.policy.parameters():
                pass
            return
        self.client.start_weight_update()
        for bucket in _buckets(self.policy.parameters()):
            self._send(bucket)
        self.client.finish_weight_update()

    def _send(self, bucket: dict[str, torch.Tensor]) -> None:
        descriptor, path = tempfile.mkstemp(prefix="lightning-ray-", dir=SHARED_MEMORY)
        os.close(descriptor)
        try:
            with boundary(WeightsError, f"writing weights to {SHARED_MEMORY}"):
                save_file(bucket, path)
            self.client.update_weights({"path": path})
        finally:
            os.unlink(path)


def _buckets(
    parameters: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[dict[str, torch.Tensor]]:
    """Copies of the tensors, gathered up to BUCKET_BYTES; a gathered tensor is soon freed."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in parameters:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket
