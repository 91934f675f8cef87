"""Takes new weights into vLLM's worker: our CPU backend, and what every device needs around it.

vLLM's own backends need CUDA. `SharedMemoryEngine` obeys the same four phases with a safetensors
file in shared memory. The module is named as vLLM's worker extension, so that it is imported, and
the backend registered, in the process that holds the model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    WeightSource,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import (
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

BACKEND = "lr_shared_memory"
_MADV_DONTNEED = 4


@dataclass
class SharedMemoryInit(WeightTransferInitInfo):
    """Nothing has to be agreed on beforehand."""


@dataclass
class SharedMemoryUpdate(WeightTransferUpdateInfo):
    """One bucket of weights."""

    path: str
    """A safetensors file in shared memory, in the checkpoint's own names."""


class SharedMemoryEngine(WeightTransferEngine[SharedMemoryInit, SharedMemoryUpdate]):
    """Loads weights from shared memory into a CPU worker."""

    init_info_cls = SharedMemoryInit
    update_info_cls = SharedMemoryUpdate

    def init_transfer_engine(self, init_info: SharedMemoryInit) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Open the model's layers for loading; CPU layers are prepacked and cannot take weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the parent's, which ends by waiting for an accelerator (vLLM 0.32)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: SharedMemoryUpdate) -> None:
        """Load one bucket."""
        with safe_open(update_info.path, "pt") as bucket:
            self.model.load_weights((name, bucket.get_tensor(name)) for name in bucket.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """Prepack the layers again, the tied head included."""
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Nothing is held."""


class WorkerExtension:
    """Methods vLLM's worker gains, for `collective_rpc`."""

    model_runner: Any

    def free_kv_pages(self) -> int:
        """Give the KV cache's memory back to the system; it reads as zeros from then on.

        Returns the bytes given back. Requests that are kept must be recomputed
        (`reset_prefix_cache(reset_running_requests=True)`).
        """
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._kv_tensors()}
        libc = ctypes.CDLL(None, use_errno=True)
        page = 4096
        for address, storage in storages.items():
            start = -(-address // page) * page
            length = (address + storage.nbytes() - start) // page * page
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED):
                raise OSError(ctypes.get_errno(), "madvise on the KV cache")
        return sum(storage.nbytes() for storage in storages.values())

    def _kv_tensors(self) -> list[torch.Tensor]:
        caches = self.model_runner.kv_caches
        return [
            t for cache in caches for t in (cache if isinstance(cache, list | tuple) else [cache])
        ]

    def resident_bytes(self) -> int:
        """Resident memory of the worker's process."""
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096


def ipc_sender(
    *,
    rank: int,
    client: Any,
    parameters: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    shapes: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
) -> Any:
    """vLLM's own CUDA IPC trainer side; every rank calls `send_weights()` on it."""

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(*shape) for shape in shapes]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return parameters()

    # packed: unpacked handles point at storage that ZeRO-3 frees when its gather closes
    init = IPCTrainerInitInfo(rank=rank, packed=True)
    return WeightTransferTrainerFactory.trainer_init(init, client=client, source=Source())


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Give a tied head the new embedding: vLLM 0.32 on CPU silently keeps its old packed copy."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.weight = model.model.embed_tokens.weight
            module.quant_method.process_weights_after_loading(module)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryEngine)
