"""Samples -> micro-batches of the ranks. Pure; numpy only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lightning_ray.config import ObjectiveConfig
from lightning_ray.schema import Batch, Sample, common_prefix

Credits = Mapping[str, float | Sequence[float]]
"""Advantage by rollout_id: one for the rollout, or one for each of its calls."""

_FLAT = "previous", "targets", "rollouts", "logprobs", "fresh", "advantages", "weights"


@dataclass
class _Unit:
    """Samples that stay together in a row, and the tokens they take there."""

    samples: list[Sample]
    size: int


def pack(
    samples: Sequence[Sample],
    *,
    advantages: Credits,
    version: int,
    tokens_per_batch: int,
    settings: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008 - frozen
    layout: str = "packed",
    rank: int = 0,
    num_ranks: int = 1,
) -> list[Batch]:
    """This rank's micro-batches of one optimiser step; every rank gets equally many.

    version:    of the weights about to be updated.
    advantages: rollouts whose advantage is 0.0 carry no gradient (but that of a KL term): they
    count in the mean, and cost no forward pass.

    A row holds one sample (`padded`), or it is the whole micro-batch: samples one behind the other
    (`packed`), or also with what a sample and the one before it begin with alike held once
    (`tree`). A micro-batch holds at most `tokens_per_batch` padded tokens, unless one sample alone
    is longer. Ranks that come short are filled up with batches of nothing.
    """
    weights = token_weights(samples, settings)
    numbers = {name: number for number, name in enumerate(weights)}
    useful = [s for s in samples if settings.kl or np.any(advantages[s.rollout_id])]
    total = num_unique(useful) if layout == "tree" else sum(len(s.token_ids) for s in useful)
    limit = min(tokens_per_batch, -(-total // num_ranks))
    batches = _batches(_units(useful, limit, layout), limit, layout)
    batches += [[[]] for _ in range(-len(batches) % num_ranks)]
    return [
        _batch(rows, advantages, weights, numbers, version, is_tree=layout == "tree")
        for rows in batches[rank::num_ranks]
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
    filled = sum(int((batch.ends > 0).sum()) for batch in batches)
    return 1.0 - filled / max(sum(batch.ends.size for batch in batches), 1)


def num_unique(samples: Sequence[Sample]) -> int:
    """Tokens of the tree of all samples."""
    ids = [np.zeros(0, np.int32), *(sample.token_ids for sample in _in_order(samples))]
    return sum(len(after) - common_prefix(before, after) for before, after in pairwise(ids))


def _in_order(samples: Sequence[Sample]) -> list[Sample]:
    """By their tokens, so that each shares most with its neighbours."""
    return sorted(samples, key=lambda s: (s.token_ids.astype(">u4").tobytes(), s.rollout_id))


def _units(samples: Sequence[Sample], limit: int, layout: str) -> list[_Unit]:
    """Each sample alone, or neighbours in the order of their tokens, which share the most."""
    if layout != "tree" or not samples:
        return [_Unit([sample], len(sample.token_ids)) for sample in samples]
    units: list[_Unit] = []
    previous = np.zeros(0, np.int32)
    for sample in _in_order(samples):
        size = len(sample.token_ids)
        added = size - common_prefix(previous, sample.token_ids)
        if units and units[-1].size + added <= limit:
            units[-1].samples.append(sample)
            units[-1].size += added
        else:
            units.append(_Unit([sample], size))
        previous = sample.token_ids
    return units


def _batches(units: Sequence[_Unit], limit: int, layout: str) -> list[list[list[Sample]]]:
    """Micro-batches of rows of samples, the largest units first: as many rows of one sample as fit
    in (`padded`), or one row, by best fit."""
    left = sorted(units, key=lambda unit: (-unit.size, unit.samples[0].rollout_id))
    if layout == "padded":
        batches = []
        while left:
            number = max(1, limit // left[0].size)
            batches.append([unit.samples for unit in left[:number]])
            left = left[number:]
        return batches
    rows: list[list[Sample]] = []
    room: list[int] = []
    for unit in left:
        fits = [i for i, free in enumerate(room) if free >= unit.size]
        if not fits:
            fits = [len(rows)]
            rows.append([])
            room.append(limit)
        tightest = min(fits, key=room.__getitem__)
        rows[tightest] += unit.samples
        room[tightest] -= unit.size
    return [[row] for row in rows]


def _paths(row: Sequence[Sample], *, is_tree: bool) -> tuple[list[np.ndarray], np.ndarray]:
    """Where in the row each sample's tokens are; where the tokens end that see each of them.

    Samples of a tree are in an order that puts those that share most side by side, so each takes
    over the front it has in common with the one before it.
    """
    ends = np.zeros(sum(len(sample.token_ids) for sample in row), np.int64)
    paths: list[np.ndarray] = []
    path, length = np.zeros(0, np.int64), 0
    for number, sample in enumerate(row):
        size = len(sample.token_ids)
        common = (
            common_prefix(row[number - 1].token_ids, sample.token_ids) if is_tree and number else 0
        )
        ends[path[common:]] = length
        path = np.concatenate([path[:common], np.arange(length, length + size - common)])
        length += size - common
        paths.append(path)
    ends[path] = length
    return paths, ends[:length]


def _batch(
    rows: Sequence[Sequence[Sample]],
    advantages: Credits,
    weights: Mapping[str, float],
    numbers: Mapping[str, int],
    version: int,
    *,
    is_tree: bool,
) -> Batch:
    laid = [_paths(row, is_tree=is_tree) for row in rows]
    width = max(2, *(len(row_ends) for _, row_ends in laid))
    token_ids, positions, ends = np.zeros((3, len(rows), width), np.int64)
    columns: list[tuple[np.ndarray, ...]] = [tuple(np.zeros(0) for _ in _FLAT)]
    for i, (row, (paths, row_ends)) in enumerate(zip(rows, laid, strict=True)):
        ends[i, : len(row_ends)] = row_ends
        if not row:
            ends[i, :2] = 2  # a row of nothing still is one that attends to itself
        for sample, path in zip(row, paths, strict=True):
            token_ids[i, path] = sample.token_ids
            positions[i, path] = np.arange(len(path))
            where = np.flatnonzero(sample.mask)
            name = sample.rollout_id
            credit = np.asarray(advantages[name])
            columns.append(
                (
                    i * width + path[where - 1],
                    sample.token_ids[where],
                    np.full(len(where), numbers[name]),
                    sample.logprobs[where],
                    sample.versions[where] == version,
                    credit[sample.calls[where]] if credit.ndim else np.full(len(where), credit),
                    np.full(len(where), weights[name]),
                )
            )
    kinds = np.int64, np.int64, np.int64, np.float32, np.bool_, np.float32, np.float32
    flat = {
        name: np.concatenate(column).astype(kind)
        for name, column, kind in zip(_FLAT, zip(*columns, strict=True), kinds, strict=True)
    }
    return Batch(
        token_ids=token_ids, positions=positions, ends=ends, num_rollouts=len(numbers), **flat
    )
