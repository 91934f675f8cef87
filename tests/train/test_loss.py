"""The loss is its formula, whatever a rollout was cut into."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from lightning_ray.schema import Batch, Sample
from lightning_ray.train.batch import pack
from lightning_ray.train.loss import policy_loss

VOCABULARY = 11


def make_sample(rollout: str, length: int, rng: np.random.Generator) -> Sample:
    mask = rng.random(length) < 0.5
    mask[0], mask[-1] = False, True
    return Sample(
        rollout_id=rollout, group_id="g", token_ids=rng.integers(0, VOCABULARY, length, np.int32),
        mask=mask, logprobs=np.where(mask, -rng.random(length) * 3, 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
    )  # fmt: skip


def split(sample: Sample) -> list[Sample]:
    """The same trained tokens as two samples with the same contexts."""
    trained = np.flatnonzero(sample.mask)
    if len(trained) < 2:
        return [sample]
    middle = trained[len(trained) // 2]
    first, second = sample.mask.copy(), sample.mask.copy()
    first[middle:], second[:middle] = False, False
    return [
        Sample(rollout_id=sample.rollout_id, group_id="g", token_ids=sample.token_ids, mask=m,
               logprobs=np.where(m, sample.logprobs, 0), versions=np.where(m, 0, -1))
        for m in (first, second)
    ]  # fmt: skip


def model_logprobs(weights: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    table = torch.log_softmax(weights, -1)
    return torch.nn.functional.pad(table[token_ids[:, :-1], token_ids[:, 1:]], (1, 0))


def loss_and_gradient(batches: list[Batch]) -> tuple[float, torch.Tensor]:
    weights = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    weights = weights.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        total = (
            total
            + policy_loss(
                model_logprobs(weights, torch.from_numpy(batch.token_ids)),
                sampled_logprobs=torch.from_numpy(batch.logprobs).double(),
                mask=torch.from_numpy(batch.mask),
                fresh=torch.from_numpy(batch.fresh),
                advantages=torch.from_numpy(batch.advantages).double(),
                weights=torch.from_numpy(batch.weights.astype(np.float64)),
                clip_low=0.2,
                clip_high=0.28,
            ).value
        )
    total.backward()
    assert weights.grad is not None
    return total.item(), weights.grad


def oracle(samples: list[Sample], advantages: dict[str, float]) -> float:
    """The formula, token by token."""
    weights = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
    table = torch.log_softmax(weights.double(), -1)
    count: dict[str, int] = {}
    for sample in samples:
        count[sample.rollout_id] = count.get(sample.rollout_id, 0) + int(sample.mask.sum())
    total = 0.0
    for s in samples:
        for t in np.flatnonzero(s.mask):
            ratio = math.exp(
                table[s.token_ids[t - 1], s.token_ids[t]].item() - float(s.logprobs[t])
            )
            advantage = advantages[s.rollout_id]
            gain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
            total -= gain / count[s.rollout_id] / len(count)
    return total


@pytest.mark.parametrize("seed", range(20))
def test_split_invariance_over_cuts_batches_and_ranks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    random.seed(seed)
    names = [f"r{i}" for i in range(5)]
    whole = [make_sample(name, int(rng.integers(3, 20)), rng) for name in names]
    cut = [part for sample in whole for part in random.choice([split, lambda s: [s]])(sample)]
    advantages = {name: float(rng.normal()) for name in names} | {"r0": 0.0}
    expected = oracle(whole, advantages)
    for samples in (whole, cut):
        for limit in (1, 40, 10_000):
            for num_ranks in (1, 2, 3):
                ranks = [
                    pack(samples, advantages=advantages, version=0, tokens_per_batch=limit,
                         rank=rank, num_ranks=num_ranks)
                    for rank in range(num_ranks)
                ]  # fmt: skip
                assert len({len(batches) for batches in ranks}) == 1
                value, gradient = loss_and_gradient([b for batches in ranks for b in batches])
                assert value == pytest.approx(expected, abs=1e-6)
                reference = loss_and_gradient(
                    pack(whole, advantages=advantages, version=0, tokens_per_batch=10_000)
                )[1]
                torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=0)


def test_a_micro_batch_holds_at_most_its_tokens_and_nothing_is_dropped() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(f"r{i}", int(rng.integers(3, 50)), rng) for i in range(40)]
    advantages = {sample.rollout_id: 1.0 for sample in samples}
    batches = pack(samples, advantages=advantages, version=0, tokens_per_batch=200)
    assert max(batch.token_ids.size for batch in batches) <= 200
    assert sum(int(b.mask.sum()) for b in batches) == sum(int(s.mask.sum()) for s in samples)
    assert sum(int(b.fresh.sum()) for b in batches) == sum(int(s.mask.sum()) for s in samples)


def test_rollouts_without_credit_cost_no_forward_pass_but_count_in_the_mean() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(name, 8, rng) for name in ("a", "b")]
    (batch,) = pack(samples, advantages={"a": 1.0, "b": 0.0}, version=0, tokens_per_batch=100)
    assert len(batch.token_ids) == 1
    assert batch.weights[0] == pytest.approx(1 / (2 * samples[0].mask.sum()))
    assert pack(samples, advantages={"a": 0.0, "b": 0.0}, version=0, tokens_per_batch=100) == []
