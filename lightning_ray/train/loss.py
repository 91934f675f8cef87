"""The objective: policy gradient per token, averaged per rollout. Pure torch.

Everything is flat: N trained tokens of one micro-batch, each with the mean's weight it has in the
optimiser step. The loss of a step is the sum over all micro-batches and ranks, so how a rollout is
cut into samples, rows or ranks changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_ray.config import ObjectiveConfig

_MAX_LOG = 20.0
"""Logs of ratios are held within this, so that exp stays finite."""


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
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    settings: ObjectiveConfig,
    rollout_log_ratio: torch.Tensor | None = None,
) -> Loss:
    """`-sum_tokens w g(r, A)`, with r = exp(logprobs - proximal) and g by `settings.kind`:

    ppo:        min(r A, clip(r, 1-low, 1+high) A) (Schulman et al. 2017, arXiv 1707.06347; the
                asymmetric range: DAPO, arXiv 2503.14476); where A < 0 not below `dual_clip` A
                (Ye et al. 2019, arXiv 1912.09729).
    gspo:       the same with the rollout's ratio, exp(mean_tokens(logprobs - proximal)), for r
                (Zheng et al. 2025, arXiv 2507.18071, in its per-token form).
    cispo:      sg(clip(r, 1-low, 1+high)) A logprobs (MiniMax 2025, arXiv 2506.13585).
    importance: r A.

    logprobs:   [N] of each trained token, with gradient.
    proximal:   [N] of the same tokens under the policy that the ratio is taken to.
    advantages: [N] of each token's rollout.
    weights:    [N] share in the mean, times the off-policy correction.
    rollout_log_ratio: [N] mean of logprobs - proximal over each token's rollout; gspo needs it.
    """
    log_ratio = (logprobs - proximal).clamp(-_MAX_LOG, _MAX_LOG)
    if settings.kind == "gspo":
        assert rollout_log_ratio is not None
        log_ratio = rollout_log_ratio + logprobs - logprobs.detach()
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    if settings.kind == "cispo":
        gain = clipped.detach() * advantages * logprobs
    elif settings.kind == "importance":
        gain = ratio * advantages
    else:
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if settings.dual_clip is not None:
            floor = settings.dual_clip * advantages
            gain = torch.where(advantages < 0, torch.maximum(gain, floor), gain)
    with torch.no_grad():
        sums = {
            "ratio": ratio.sum(),
            "clipped_low": (ratio < 1.0 - settings.clip_low).sum(),
            "clipped_high": (ratio > 1.0 + settings.clip_high).sum(),
        }
    return Loss(-(weights * gain).sum(), sums)


def correction(
    log_ratio: torch.Tensor, settings: ObjectiveConfig, *, rollout_log_ratio: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of each token for having been sampled by another policy, and where it is not r.

    With r = exp(log_ratio), by `settings.correction`:

    token:   min(r, high), truncated importance sampling (Yao et al. 2025, "Your efficient RL
             framework secretly brings you off-policy RL training").
    rollout: min(prod_tokens r, high), one weight for the rollout.
    band:    1 where low <= r <= high and 0 elsewhere (IcePop, Ling team 2025, arXiv 2510.18855).

    log_ratio:         [N] proximal less sampled log-prob.
    rollout_log_ratio: [N] its sum over each token's rollout.
    """
    ratio = log_ratio.clamp(-_MAX_LOG, _MAX_LOG).exp()
    if settings.correction == "rollout":
        ratio = rollout_log_ratio.clamp(-_MAX_LOG, _MAX_LOG).exp()
    if settings.correction == "band":
        inside = (ratio >= settings.correction_low) & (ratio <= settings.correction_high)
        return inside.to(ratio.dtype), ~inside
    if settings.correction == "off":
        return torch.ones_like(ratio), torch.zeros_like(ratio, dtype=torch.bool)
    return ratio.clamp(max=settings.correction_high), ratio > settings.correction_high


def divergence(
    logprobs: torch.Tensor, *, reference: torch.Tensor, weights: torch.Tensor, kind: str
) -> torch.Tensor:
    """`sum_tokens w k` with the estimate k of KL(policy || reference) (Schulman 2020, joschu.net/
    blog/kl-approx.html): k1 = log(p/q), k3 = q/p - 1 - log(q/p). Unlike k1's, k3's gradient is not
    zero on average at q = p. Shapes as in `policy_loss`."""
    log_ratio = (reference - logprobs).clamp(-_MAX_LOG, _MAX_LOG)
    return (weights * (-log_ratio if kind == "k1" else log_ratio.exp() - 1.0 - log_ratio)).sum()
