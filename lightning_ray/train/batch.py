"""Samples -> padded micro-batches for this rank. Pure; numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_ray.schema import Batch, Sample


def pack(
    samples: Sequence[Sample],
    *,
    advantages: Mapping[str, float],
    version: int,
    tokens_per_batch: int,
    rank: int = 0,
    num_ranks: int = 1,
) -> list[Batch]:
    """This rank's micro-batches of one optimiser step; every rank gets equally many.

    version:    of the weights about to be updated.
    advantages: by rollout_id. Rollouts whose advantage is 0.0 carry no gradient: they count in the
    mean, and cost no forward pass. A micro-batch holds at most `tokens_per_batch` padded tokens,
    unless one sample alone is longer. Short ranks are filled with rows of weight 0.
    """
    trained = Counter[str]()
    for sample in samples:
        trained[sample.rollout_id] += int(sample.mask.sum())
    weights = {name: 1.0 / (len(trained) * count) for name, count in trained.items()}
    useful = [sample for sample in samples if advantages[sample.rollout_id] != 0.0]
    useful.sort(key=lambda sample: (-len(sample.token_ids), sample.rollout_id))
    share = -(-len(useful) // num_ranks)
    rows: list[Sample | None] = [*useful, *[None] * (share * num_ranks - len(useful))]
    # dealt out by length, so every rank cuts its rows at the same places
    longest = [len(useful[i * num_ranks].token_ids) for i in range(share)]
    return [
        _batch(
            rows[rank + start * num_ranks : end * num_ranks : num_ranks],
            advantages,
            weights,
            version,
        )
        for start, end in _cuts(longest, tokens_per_batch)
    ]


def _cuts(longest: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """[start, end) of each micro-batch over rows sorted by falling length."""
    cuts, start = [], 0
    while start < len(longest):
        num_rows = max(1, limit // longest[start])
        cuts.append((start, min(start + num_rows, len(longest))))
        start += num_rows
    return cuts


def _batch(
    rows: Sequence[Sample | None],
    advantages: Mapping[str, float],
    weights: Mapping[str, float],
    version: int,
) -> Batch:
    lengths = np.array([len(row.token_ids) if row else 1 for row in rows], np.int64)
    shape = len(rows), max(2, int(lengths.max()))
    token_ids = np.zeros(shape, np.int64)
    mask = np.zeros(shape, bool)
    fresh = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        if row is not None:
            n = len(row.token_ids)
            token_ids[i, :n], mask[i, :n], logprobs[i, :n] = row.token_ids, row.mask, row.logprobs
            fresh[i, :n] = row.versions == version
    return Batch(
        token_ids=token_ids,
        lengths=lengths,
        mask=mask,
        logprobs=logprobs,
        fresh=fresh,
        advantages=np.array([advantages[r.rollout_id] if r else 0.0 for r in rows], np.float32),
        weights=np.array([weights[r.rollout_id] if r else 0.0 for r in rows], np.float32),
    )
