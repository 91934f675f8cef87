"""One rank of an update, as a program: `python -m tests.train.ranks CASES`, RANK and so on set.

Prints, for each case, the metrics of two updates and the weights' sum of squares after them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import numpy as np
import torch

from lightning_ray.config import Config
from lightning_ray.schema import Batch, Sample
from lightning_ray.train.batch import pack, split_rollouts
from lightning_ray.train.policy import Policy
from tests.train.samples import cut, make_sample, siblings

NAMES = [f"r{i}" for i in range(6)]


def main(cases: list[dict[str, Any]]) -> None:
    deepspeed.init_distributed("gloo", verbose=False)
    results = [run(**case) for case in cases]
    if torch.distributed.get_rank() == 0:
        print(json.dumps(results))


def run(
    model: str, train: dict[str, Any], num_cuts: int = 0, vocabulary: int = 200
) -> dict[str, Any]:
    config = Config.model_validate(
        {
            "name": "x",
            "model": {"path": model, "dtype": "float32"},
            "train": {"lr": 1e-3, "gradient_clipping": 1e9, **train},
        }
    )
    policy = Policy(config)
    before = {name: tensor.clone() for name, tensor in policy.parameters()}
    rng = np.random.default_rng(0)
    samples = [make_sample(name, int(rng.integers(20, 60)), rng, vocabulary=200) for name in NAMES]
    samples += siblings(2 * len(NAMES), rng, vocabulary=vocabulary)
    for _ in range(num_cuts):
        samples = cut(samples, rng)
    advantages = dict(zip(NAMES, [1.0, -0.5, 0.0, 0.7, -1.0, 0.3], strict=True))
    samples.sort(key=lambda sample: sample.rollout_id)

    def packed(part: list[Sample], **changes: Any) -> list[Batch]:
        settings = config.train.model_copy(update=changes)
        return pack(
            part, advantages=advantages, version=policy.version, settings=settings.objective,
            tokens_per_batch=settings.tokens_per_batch, layout=settings.layout,
            rank=torch.distributed.get_rank(), num_ranks=torch.distributed.get_world_size(),
        )  # fmt: skip

    policy.check_split(packed(samples), packed(samples, layout="padded", tokens_per_batch=1))
    metrics: list[dict[str, float]] = []
    for _ in range(2):
        parts = split_rollouts(samples, config.train.optimizer_steps)
        metrics.append(policy.update([packed(part) for part in parts]))
    weights = sum(float((tensor.double() ** 2).sum()) for _, tensor in policy.parameters())
    moved = {name: not tensor.equal(before[name]) for name, tensor in policy.parameters()}
    return {"metrics": metrics, "weights": weights, "moved": moved}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
