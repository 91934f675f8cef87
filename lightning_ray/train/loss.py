"""The objective: clipped policy gradient, normalised per rollout. Pure torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Loss:
    """One micro-batch's share of the step's loss, and sums for its metrics."""

    value: torch.Tensor
    """Scalar, with gradient."""
    sums: dict[str, torch.Tensor]
    """Scalars over trained tokens, without gradient."""


def policy_loss(
    logprobs: torch.Tensor,
    *,
    sampled_logprobs: torch.Tensor,
    mask: torch.Tensor,
    fresh: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """`(1/R) sum_rollouts (1/T_rollout) sum_tokens -min(r A, clip(r, 1-low, 1+high) A)`.

    r = exp(logprobs - sampled_logprobs); PPO's clip (Schulman et al. 2017, arXiv 1707.06347) with
    an asymmetric range (DAPO, arXiv 2503.14476). The sums over rollouts and tokens run over all
    rows, micro-batches and ranks of the optimiser step, so how a rollout is cut changes nothing.

    logprobs, sampled_logprobs: [B, T] of each token given those before it.
    mask:       [B, T] True at trained tokens.
    fresh:      [B, T] True where the very weights being updated sampled the token; there the ratio
                is 1 but for the numerics of engine and policy, and its log is their gap.
    advantages: [B] of each row's rollout.
    weights:    [B] 1 / (R x T_rollout) of each row's rollout.
    """
    log_ratio = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    gain = torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    value = -(torch.where(mask, gain, 0.0) * weights[:, None]).sum()
    with torch.no_grad():
        sums = {
            "num_tokens": mask.sum(),
            "num_fresh": fresh.sum(),
            "gap": torch.where(fresh, log_ratio, 0.0).abs().sum(),
            "ratio": torch.where(mask, ratio, 0.0).sum(),
            "clipped": (torch.where(mask, ratio, 1.0) != clipped).logical_and(mask).sum(),
        }
    return Loss(value, sums)
