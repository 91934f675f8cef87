"""Each objective is its formula, written out token by token, whatever a rollout was cut into."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ray.config import Config, ObjectiveConfig
from lightning_ray.schema import Batch, Sample
from lightning_ray.train.batch import num_unique, pack, padding_share, split_rollouts
from lightning_ray.train.loss import correction, divergence, policy_loss
from tests.train.samples import cut, make_sample, siblings
from tests.train.test_attention import visible

VOCABULARY = 11
OBJECTIVES = [
    {"kind": kind, "mean": mean}
    for kind, mean in itertools.product(
        ("ppo", "gspo", "cispo", "importance"), ("rollout_mean", "token_mean", "constant")
    )
]
OBJECTIVES += [{"dual_clip": 1.5}, {"kind": "gspo", "dual_clip": 1.2}]
OBJECTIVES += [
    {"proximal": "recomputed", "correction": how, "correction_high": 1.3}
    for how in ("off", "token", "rollout", "band")
]


def table(seed: int) -> torch.Tensor:
    """[V, V] log-probs of a bigram model."""
    weights = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return torch.log_softmax(weights.double(), -1)


NOW, BEFORE = table(0), table(1)
"""The policy that is trained, and the one that `recomputed` log-probs are of."""


def loss_and_gradient(
    batches: list[Batch], settings: ObjectiveConfig
) -> tuple[float, torch.Tensor]:
    """As the policy puts the parts together, with a bigram model in place of a transformer."""
    now = NOW.clone().requires_grad_()
    log_ratios, log_weights = torch.zeros(2, 100, dtype=torch.float64)
    counts = torch.zeros(100, dtype=torch.float64)
    columns = [_columns(batch, now, settings) for batch in batches]
    for column in columns:
        log_ratios.index_add_(0, column["rollouts"], (column["now"] - column["before"]).detach())
        log_weights.index_add_(0, column["rollouts"], column["before"] - column["sampled"])
        counts.index_add_(0, column["rollouts"], torch.ones_like(column["before"]))
    total = torch.zeros((), dtype=torch.float64)
    for column in columns:
        rollouts = column["rollouts"]
        trust, _ = correction(
            column["before"] - column["sampled"], settings, rollout_log_ratio=log_weights[rollouts]
        )
        total = (
            total
            + policy_loss(
                column["now"],
                proximal=column["before"],
                advantages=column["advantages"],
                weights=column["weights"] * trust,
                settings=settings,
                rollout_log_ratio=(log_ratios / counts.clamp(min=1))[rollouts],
            ).value
        )
    total.backward()
    assert now.grad is not None
    return total.item(), now.grad


def _columns(batch: Batch, now: torch.Tensor, settings: ObjectiveConfig) -> dict[str, Any]:
    last = torch.from_numpy(batch.token_ids).flatten()[torch.from_numpy(batch.previous)]
    place = last, torch.from_numpy(batch.targets)
    sampled = torch.from_numpy(batch.logprobs).double()
    return {
        "now": now[place],
        "before": sampled if settings.proximal == "sampled" else BEFORE[place],
        "sampled": sampled,
        "rollouts": torch.from_numpy(batch.rollouts),
        "advantages": torch.from_numpy(batch.advantages).double(),
        "weights": torch.from_numpy(batch.weights).double(),
    }


def oracle(samples: list[Sample], advantages: dict[str, float], s: ObjectiveConfig) -> float:
    """The formulas in plain Python, rollout by rollout and token by token."""
    tokens: dict[str, list[tuple[float, float, float]]] = {}
    for sample in samples:
        for t in np.flatnonzero(sample.mask):
            place = sample.token_ids[t - 1], sample.token_ids[t]
            sampled = float(sample.logprobs[t])
            before = sampled if s.proximal == "sampled" else BEFORE[place].item()
            tokens.setdefault(sample.rollout_id, []).append((NOW[place].item(), before, sampled))
    total = 0.0
    for name, row in tokens.items():
        a = advantages[name]
        mean_log = sum(now - before for now, before, _ in row) / len(row)
        product = math.exp(min(max(sum(b - sampled for _, b, sampled in row), -20), 20))
        for now, before, sampled in row:
            r = math.exp(mean_log if s.kind == "gspo" else now - before)
            c = min(max(r, 1 - s.clip_low), 1 + s.clip_high)
            if s.kind == "cispo":
                gain = c * a * now
            elif s.kind == "importance":
                gain = r * a
            else:
                gain = min(r * a, c * a)
                if s.dual_clip is not None and a < 0:
                    gain = max(gain, s.dual_clip * a)
            w = math.exp(before - sampled)
            trust = {
                "off": 1.0,
                "token": min(w, s.correction_high),
                "rollout": min(product, s.correction_high),
                "band": float(s.correction_low <= w <= s.correction_high),
            }[s.correction]
            share = {
                "rollout_mean": len(tokens) * len(row),
                "token_mean": sum(len(other) for other in tokens.values()),
                "constant": len(tokens) * s.constant_tokens,
            }[s.mean]
            total -= trust * gain / share
    return total


@pytest.mark.parametrize("fields", OBJECTIVES, ids=lambda f: "-".join(map(str, f.values())))
def test_split_invariance_and_the_oracle_over_cuts_layouts_and_ranks(
    fields: dict[str, Any],
) -> None:
    settings = ObjectiveConfig(**fields)
    for seed in range(10):
        rng = np.random.default_rng(seed)
        whole = [make_sample(f"r{i}", int(rng.integers(3, 20)), rng) for i in range(5)]
        advantages = {f"r{i}": float(rng.normal()) for i in range(5)} | {"r0": 0.0}
        expected, reference = oracle(whole, advantages, settings), None
        for samples in (
            whole,
            *(cut(whole, rng) for _ in range(10 if fields == OBJECTIVES[0] else 2)),
        ):
            num_ranks, limit = int(rng.integers(1, 4)), int(rng.choice([1, 40, 10_000]))
            ranks = [
                pack(samples, advantages=advantages, version=0, tokens_per_batch=limit,
                     settings=settings, layout=("packed", "padded", "tree")[seed % 3], rank=rank,
                     num_ranks=num_ranks)
                for rank in range(num_ranks)
            ]  # fmt: skip
            assert len({len(batches) for batches in ranks}) == 1
            value, gradient = loss_and_gradient([b for batches in ranks for b in batches], settings)
            reference = gradient if reference is None else reference
            assert value == pytest.approx(expected, abs=1e-6)
            torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_divergence_estimates_the_kl(kind: str) -> None:
    p, q = NOW[0].exp(), BEFORE[0]
    exact = float((p * (NOW[0] - q)).sum())
    assert divergence(NOW[0], reference=q, weights=p, kind=kind).item() == pytest.approx(exact)


def test_a_correction_says_what_it_touched() -> None:
    log_ratio = torch.tensor([-2.0, 0.0, 2.0])
    band = ObjectiveConfig(proximal="recomputed", correction="band")
    weight, touched = correction(log_ratio, band, rollout_log_ratio=log_ratio)
    assert weight.tolist() == [0.0, 1.0, 0.0]
    assert touched.tolist() == [True, False, True]


def test_a_correction_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="proximal=recomputed"):
        ObjectiveConfig(correction="token")
    with pytest.raises(ValueError, match="dual_clip"):
        Config.model_validate(
            {"name": "x", "model": {"path": "x"}, "train": {"objective": {"dual_clip": 0.5}}}
        )


@pytest.mark.parametrize("layout", ["packed", "padded", "tree"])
def test_a_micro_batch_holds_at_most_its_tokens_and_nothing_is_dropped(layout: str) -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(f"r{i}", int(rng.integers(3, 50)), rng) for i in range(40)]
    advantages = {sample.rollout_id: 1.0 for sample in samples}
    batches = pack(
        samples, advantages=advantages, version=0, tokens_per_batch=200, layout=layout
    )  # fmt: skip
    assert max(batch.token_ids.size for batch in batches) <= 200
    num_trained = sum(int(sample.mask.sum()) for sample in samples)
    assert sum(len(batch.targets) for batch in batches) == num_trained
    assert sum(int(batch.fresh.sum()) for batch in batches) == num_trained
    assert sum(float(batch.weights.sum()) for batch in batches) == pytest.approx(1.0)


def test_a_tree_holds_what_samples_begin_with_alike_once() -> None:
    rng = np.random.default_rng(0)
    samples = siblings(12, rng)
    advantages = {sample.rollout_id: 1.0 for sample in samples}
    (batch,) = pack(samples, advantages=advantages, version=0, tokens_per_batch=999, layout="tree")
    fronts = {tuple(s.token_ids[:n]) for s in samples for n in range(1, len(s.token_ids) + 1)}
    assert (batch.ends > 0).sum() == len(fronts) == num_unique(samples)
    assert len(fronts) < sum(len(sample.token_ids) for sample in samples) / 2
    seen = visible(torch.from_numpy(batch.ends))[0].numpy()
    expected = {
        (sample.rollout_id, *sample.token_ids[: t + 1].tolist())
        for sample in samples for t in np.flatnonzero(sample.mask)
    }  # fmt: skip
    names = list(dict.fromkeys(sample.rollout_id for sample in samples))
    found = {
        (names[rollout], *batch.token_ids[0][seen[previous]].tolist(), target)
        for rollout, previous, target in zip(
            batch.rollouts, batch.previous, batch.targets, strict=True
        )
    }
    assert found == expected  # what a trained token sees is its own sample's front, in order
    for previous in batch.previous:
        assert batch.positions[0][seen[previous]].tolist() == list(range(seen[previous].sum()))


def test_every_rank_has_its_part_of_a_tree() -> None:
    samples = siblings(24, np.random.default_rng(0))
    advantages = {sample.rollout_id: 1.0 for sample in samples}
    sizes = [
        sum(
            batch.token_ids.size
            for batch in pack(samples, advantages=advantages, version=0, tokens_per_batch=9999,
                              layout="tree", rank=rank, num_ranks=2)
        )
        for rank in range(2)
    ]  # fmt: skip
    assert min(sizes) > max(sizes) / 2


def test_packed_rows_have_no_padding() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(f"r{i}", int(rng.integers(100, 900)), rng) for i in range(64)]
    advantages = {sample.rollout_id: 1.0 for sample in samples}
    share = {
        layout: padding_share(
            pack(samples, advantages=advantages, version=0, tokens_per_batch=16384, layout=layout)
        )
        for layout in ("packed", "padded")
    }
    assert share["packed"] == 0.0 < 0.05 < share["padded"]


def test_trained_tokens_are_found_behind_those_before_them() -> None:
    rng = np.random.default_rng(1)
    samples = [make_sample(name, 8, rng) for name in "abc"]
    (batch,) = pack(samples, advantages=dict.fromkeys("abc", 1.0), version=0, tokens_per_batch=99)
    rows = batch.token_ids.ravel()
    expected = [
        (sample.token_ids[t - 1], sample.token_ids[t])
        for sample in samples
        for t in np.flatnonzero(sample.mask)
    ]
    found = zip(rows[batch.previous], batch.targets, strict=True)
    assert sorted(found) == sorted(expected)


def test_credit_may_differ_between_the_calls_of_a_rollout() -> None:
    rng = np.random.default_rng(0)
    sample = make_sample("a", 9, rng)
    where = np.flatnonzero(sample.mask)
    calls = np.full(9, -1, np.int32)
    calls[where] = np.arange(len(where)) % 2
    (batch,) = pack(
        [replace(sample, calls=calls)], advantages={"a": [0.5, -2.0]}, version=0,
        tokens_per_batch=99,
    )  # fmt: skip
    assert batch.advantages.tolist() == [(0.5, -2.0)[i % 2] for i in range(len(where))]


def test_rollouts_without_credit_cost_no_forward_pass_but_count_in_the_mean() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(name, 8, rng) for name in ("a", "b")]
    (batch,) = pack(samples, advantages={"a": 1.0, "b": 0.0}, version=0, tokens_per_batch=100)
    assert len(batch.token_ids) == 1
    assert batch.weights[0] == pytest.approx(1 / (2 * samples[0].mask.sum()))
    assert pack(samples, advantages={"a": 0.0, "b": 0.0}, version=0, tokens_per_batch=100) == []


def test_optimizer_steps_share_the_rollouts_and_split_none() -> None:
    rng = np.random.default_rng(0)
    samples = cut([make_sample(f"r{i}", 12, rng) for i in range(7)], rng)
    parts = split_rollouts(samples, 3)
    names = [{sample.rollout_id for sample in part} for part in parts]
    assert sorted(map(len, names)) == [2, 2, 3]
    assert len(set.union(*names)) == 7
    assert sum(map(len, parts)) == len(samples)
    assert len(split_rollouts(samples[:1], 3)) == 1
