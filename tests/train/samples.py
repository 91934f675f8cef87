"""Made samples, and random cuts of them that train the same tokens after the same contexts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from lightning_ray.schema import Sample


def make_sample(
    rollout: str, length: int, rng: np.random.Generator, *, vocabulary: int = 11
) -> Sample:
    mask = rng.random(length) < 0.5
    mask[0], mask[-1] = False, True
    return Sample(
        rollout_id=rollout, group_id="g", token_ids=rng.integers(0, vocabulary, length, np.int32),
        mask=mask, logprobs=np.where(mask, -rng.random(length) * 3, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        calls=np.where(mask, 0, -1).astype(np.int32),
    )  # fmt: skip


def siblings(number: int, rng: np.random.Generator, *, vocabulary: int = 11) -> list[Sample]:
    """Samples of rollouts that begin alike, and of a few that go on alike."""
    samples: list[Sample] = []
    for i in range(number):
        base = samples[int(rng.integers(0, i))] if i else make_sample("r0", 30, rng)
        keep = int(rng.integers(10, len(base.token_ids) + 1))
        fresh = make_sample(f"r{i // 2}", int(rng.integers(5, 20)), rng, vocabulary=vocabulary)
        samples.append(
            replace(fresh, token_ids=np.concatenate([base.token_ids[:keep], fresh.token_ids]),
                    mask=np.concatenate([np.zeros(keep, bool), fresh.mask]),
                    logprobs=np.concatenate([np.zeros(keep, np.float32), fresh.logprobs]),
                    versions=np.concatenate([np.full(keep, -1, np.int32), fresh.versions]),
                    calls=np.concatenate([np.full(keep, -1, np.int32), fresh.calls]))
        )  # fmt: skip
    return samples


def cut(samples: list[Sample], rng: np.random.Generator) -> list[Sample]:
    """Each sample in up to three, in another order."""
    parts = [part for sample in samples for part in _cut(sample, int(rng.integers(1, 4)), rng)]
    return [parts[i] for i in rng.permutation(len(parts))]


def _cut(sample: Sample, number: int, rng: np.random.Generator) -> list[Sample]:
    owner = rng.integers(0, number, len(sample.mask))
    masks = [sample.mask & (owner == i) for i in range(number)]
    return [
        Sample(
            rollout_id=sample.rollout_id, group_id="g", mask=mask[:end],
            token_ids=sample.token_ids[:end],  # a part ends with what it trains
            logprobs=np.where(mask, sample.logprobs, 0)[:end],
            versions=np.where(mask, sample.versions, -1)[:end],
            calls=np.where(mask, sample.calls, -1)[:end],
        )
        for mask in masks
        if mask.any()
        for end in [int(np.flatnonzero(mask)[-1]) + 1]
    ]  # fmt: skip
