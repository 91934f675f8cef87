"""A second, independent view of what the engine sampled: a logits processor in vLLM's core.

It sits in another process than the capture, sees the token ids the scheduler holds, and knows
nothing of HTTP. When a request leaves the batch its ids are appended to a JSON-lines file.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality


class Witness(LogitsProcessor):
    """Writes prompt and sampled ids of each request that leaves the batch."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._requests: dict[int, tuple[list[int], list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._write(self._requests.pop(index, None))
        for index, _, prompt_ids, output_ids in batch_update.added:
            self._write(self._requests.pop(index, None))
            self._requests[index] = (prompt_ids or [], output_ids)
        for first, second, direction in batch_update.moved:
            moved = self._requests.pop(first, None)
            other = self._requests.pop(second, None)
            if moved is not None:
                self._requests[second] = moved
            if direction == MoveDirectionality.SWAP and other is not None:
                self._requests[first] = other
            else:
                self._write(other)  # its row is taken by another

    def _write(self, request: tuple[list[int], list[int]] | None) -> None:
        if request is not None:
            with open(os.environ["LR_TEST_WITNESS"], "a") as file:
                file.write(json.dumps({"prompt": request[0], "output": list(request[1])}) + "\n")
