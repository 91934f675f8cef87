"""Samples -> micro-batches of the ranks. Pure; numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from lightning_ray.config import ObjectiveConfig
from lightning_ray.schema import Batch, Sample

Row = list[Sample]
_ROW = 4
"""Longest samples that a packed row has room for."""
_FLAT = "previous", "targets", "rollouts", "logprobs", "fresh", "advantages", "weights"


def pack(
    samples: Sequence[Sample],
    *,
    advantages: Mapping[str, float],
    version: int,
    tokens_per_batch: int,
    settings: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - frozen
    layout: str = "packed",
    rank: int = 0,
    num_ranks: int = 1,
) -> list[Batch]:
    """This rank's micro-batches of one optimiser step; every rank gets equally many.

    version:    of the weights about to be updated.
    advantages: by rollout_id. Rollouts whose advantage is 0.0 carry no gradient (but that of a KL
    term): they count in the mean, and cost no forward pass.

    A micro-batch holds at most `tokens_per_batch` padded tokens, unless one sample alone is longer.
    Ranks that come short are filled up with batches of nothing.
    """
    weights = token_weights(samples, settings)
    numbers = {name: number for number, name in enumerate(weights)}
    useful = [s for s in samples if settings.kl or advantages[s.rollout_id] != 0.0]
    total = sum(len(sample.token_ids) for sample in useful)
    limit = min(tokens_per_batch, -(-total // num_ranks))
    batches = _rows(useful, limit, is_packed=layout == "packed")
    batches += [[[]] for _ in range(-len(batches) % num_ranks)]
    return [
        _batch(rows, advantages, weights, numbers, version) for rows in batches[rank::num_ranks]
    ]


def split_rollouts(samples: Sequence[Sample], num_parts: int) -> list[list[Sample]]:
    """The samples in at most so many parts, for an optimiser step each; no rollout is split."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(s.rollout_id for s in samples))}
    parts: list[list[Sample]] = [[] for _ in range(min(num_parts, max(len(numbers), 1)))]
    for sample in samples:
        parts[numbers[sample.rollout_id] % len(parts)].append(sample)
    return parts


def token_weights(samples: Sequence[Sample], settings: ObjectiveConfig) -> dict[str, float]:
    """By rollout, what each of its trained tokens weighs in the mean.

    R rollouts, T_i trained tokens of rollout i: 1 / (R T_i) (`rollout_mean`), 1 / sum T
    (`token_mean`; DAPO, arXiv 2503.14476), 1 / (R L) with L = `constant_tokens` (`constant`;
    Dr.GRPO, arXiv 2503.20783).
    """
    counts = Counter[str]()
    for sample in samples:
        counts[sample.rollout_id] += int(sample.mask.sum())
    if settings.mean == "rollout_mean":
        return {name: 1.0 / (len(counts) * count) for name, count in counts.items()}
    per = len(counts) * settings.constant_tokens
    divisor = counts.total() if settings.mean == "token_mean" else per
    return dict.fromkeys(counts, 1.0 / divisor)


def padding_share(batches: Sequence[Batch]) -> float:
    """Share of the rows that no sample fills."""
    filled = sum(int((batch.segments >= 0).sum()) for batch in batches)
    return 1.0 - filled / max(sum(batch.segments.size for batch in batches), 1)


def _rows(samples: Sequence[Sample], limit: int, *, is_packed: bool) -> list[list[Row]]:
    """Micro-batches of rows, by best fit, the longest samples first.

    A packed row has room for `_ROW` times the longest sample left; with much less, what is left
    over in it is too short for most samples.
    """
    left = sorted(samples, key=lambda sample: (-len(sample.token_ids), sample.rollout_id))
    batches = []
    while left:
        longest, rest = len(left[0].token_ids), []
        width = max(longest, min(_ROW * longest, limit)) if is_packed else longest
        rows: list[Row] = []
        room: list[int] = []
        for sample in left:
            length = len(sample.token_ids)
            fits = [i for i, free in enumerate(room) if free >= length and is_packed]
            if not fits and len(rows) < max(1, limit // width):
                rows.append([])
                room.append(width)
                fits = [len(rows) - 1]
            if not fits:
                rest.append(sample)
                continue
            tightest = min(fits, key=room.__getitem__)
            rows[tightest].append(sample)
            room[tightest] -= length
        batches.append(rows)
        left = rest
    return batches


def _batch(
    rows: Sequence[Row],
    advantages: Mapping[str, float],
    weights: Mapping[str, float],
    numbers: Mapping[str, int],
    version: int,
) -> Batch:
    width = max(2, *(sum(len(sample.token_ids) for sample in row) for row in rows))
    token_ids = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    segments = np.full((len(rows), width), -1, np.int64)
    columns: list[tuple[np.ndarray, ...]] = [tuple(np.zeros(0) for _ in range(7))]
    for i, row in enumerate(rows):
        start = 0
        segments[i, :2] = -1 if row else 0  # a row of nothing still is one that attends to itself
        for number, sample in enumerate(row):
            end = start + len(sample.token_ids)
            token_ids[i, start:end] = sample.token_ids
            positions[i, start:end] = np.arange(end - start)
            segments[i, start:end] = number
            where = np.flatnonzero(sample.mask)
            name = sample.rollout_id
            columns.append(
                (
                    i * width + start + where - 1,
                    sample.token_ids[where],
                    np.full(len(where), numbers[name]),
                    sample.logprobs[where],
                    sample.versions[where] == version,
                    np.full(len(where), advantages[name]),
                    np.full(len(where), weights[name]),
                )
            )
            start = end
    kinds = np.int64, np.int64, np.int64, np.float32, np.bool_, np.float32, np.float32
    flat = {
        name: np.concatenate(column).astype(kind)
        for name, column, kind in zip(_FLAT, zip(*columns, strict=True), kinds, strict=True)
    }
    return Batch(
        token_ids=token_ids, positions=positions, segments=segments,
        num_rollouts=len(numbers), **flat,
    )  # fmt: skip
