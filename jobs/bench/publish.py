"""How long a publish takes against a plain copy of the same bytes, on this machine's CPUs.

    python -m jobs.bench.publish [--model models/smollm2] [--rounds 5]

A real engine in a real actor takes the weights by vLLM's four phases from shared memory; the
policy's side is the same sender the trainer uses, over a transformers model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transformers

from lightning_ray.config import Config
from lightning_ray.engine.actor import call_all, start_engines
from lightning_ray.placement import engine_share, make_group
from lightning_ray.train.publish import _Client, _SharedMemorySender


class Weights:
    """The part of a policy that a sender needs."""

    def __init__(self, path: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def parameters(self) -> Any:
        yield from ((name, p.detach()) for name, p in self.model.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="models/smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = Config.model_validate(
        {"name": "bench", "model": {"path": options.model, "dtype": "float32"},
         "engine": {"device": "cpu", "max_model_len": 512, "kv_cache_bytes": 128 << 20}}
    )  # fmt: skip
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    engines = start_engines(
        config, group=make_group(config), secret="s", share=engine_share(config)
    )
    call_all(engines, "start")
    weights = Weights(options.model)
    num_bytes = sum(p.nbytes for _, p in weights.parameters())
    client = _Client(engines)
    sender = _SharedMemorySender(weights, client=client, is_sender=True)  # type: ignore[arg-type]
    publishes, copies = [], []
    for version in range(1, options.rounds + 1):
        client.version = version
        started_at = time.perf_counter()
        sender.send_weights()
        call_all(engines, "resume")
        call_all(engines, "canary", version)
        publishes.append(time.perf_counter() - started_at)
        copies.append(_plain_copy(weights))
    publish, copy = statistics.median(publishes), statistics.median(copies)
    print(f"{num_bytes / 1e6:.0f} MB fp32, median of {options.rounds}")
    print(f"publish     {publish:.2f} s  {num_bytes / publish / 1e9:.2f} GB/s")
    print(
        f"plain copy  {copy:.2f} s  {num_bytes / copy / 1e9:.2f} GB/s  (ratio {publish / copy:.1f})"
    )


def _plain_copy(weights: Weights) -> float:
    """Seconds to write the same bytes to shared memory and read them back."""
    started_at = time.perf_counter()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        for _, parameter in weights.parameters():
            file.write(parameter.contiguous().numpy().tobytes())
        file.flush()
        Path(file.name).read_bytes()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    main()
