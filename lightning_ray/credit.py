"""Rewards of a group -> advantages of its rollouts; whether there is any signal in them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import numpy as np

from lightning_ray.config import SignalConfig
from lightning_ray.errors import ConfigError
from lightning_ray.schema import OutcomeKind, Trajectory

Assign = Callable[[Sequence[Trajectory], list[float]], Sequence[float | Sequence[float]]]

_EPSILON = 1e-6
_EQUAL = 1e-12


def advantages(groups: Sequence[Sequence[float | None]], *, estimator: str) -> list[list[float]]:
    """What each rollout is better than its group, by `estimator`; n scored rollouts in a group:

    grpo:      (r - mean) / (std + 1e-6), population std (Shao et al. 2024, arXiv 2402.03300).
    dr_grpo:   r - mean (Liu et al. 2025, arXiv 2503.20783).
    rloo:      r - mean of the n-1 others (Ahmadian et al. 2024, arXiv 2402.14740).
    reinforce_baseline: r - mean, then over all scored rollouts less their mean, divided by their
               std + 1e-6 (REINFORCE++-baseline, Hu et al. 2025, arXiv 2501.03262).

    groups: rewards; None where a rollout is masked: its advantage is 0.0 and it moves no mean.
    Groups of one, and those whose rewards are all equal, say nothing: 0.0.
    Raises ValueError when a reward is NaN or infinite.

    advantages([[1.0, 0.0, None, 1.0, 0.0]], estimator="dr_grpo")  ->  [[0.5, -0.5, 0.0, 0.5, -0.5]]
    """
    centred = [_centred(group) for group in groups]
    if estimator == "grpo":
        scales = [1.0 / (_spread(group) + _EPSILON) for group in groups]
    elif estimator == "rloo":
        numbers = [len(_scored(group)) for group in groups]
        scales = [n / (n - 1) if n > 1 else 1.0 for n in numbers]
    elif estimator == "reinforce_baseline":
        spread = float(np.std([a for group in centred for a in group if a is not None] or [0.0]))
        scales = [1.0 / (spread + _EPSILON)] * len(groups)  # each group's mean is 0, so is theirs
    else:
        scales = [1.0] * len(groups)
    return [
        [(a or 0.0) * scale if _spread(group) > _EQUAL else 0.0 for a in row]
        for group, row, scale in zip(groups, centred, scales, strict=True)
    ]


def assigned(
    assign: Assign, trajectories: Sequence[Trajectory], row: Sequence[float]
) -> list[float | list[float]]:
    """Credit within the rollouts of a group, by the user's function; ConfigError unless it gives,
    for each rollout, a finite number or one for each of its calls in the order of `calls`."""
    given = list(assign(trajectories, list(row)))
    values = [np.asarray(credit, float) for credit in given]
    sizes = [(len(trajectory.calls),) for trajectory in trajectories]
    if len(given) != len(sizes) or not all(
        value.shape in ((), size) and np.isfinite(value).all()
        for value, size in zip(values, sizes, strict=False)
    ):
        raise ConfigError(
            f"train.credit must return, for {len(sizes)} rollouts with {[n for (n,) in sizes]} "
            f"calls, a finite advantage each or a list with one for each call; got {given}"
        )
    orders = [np.argsort([call.index for call in t.calls]) for t in trajectories]
    return [
        v[order].tolist() if v.ndim else v.item() for v, order in zip(values, orders, strict=True)
    ]


def _centred(rewards: Sequence[float | None]) -> list[float | None]:
    scored = _scored(rewards)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards must be finite; got {list(rewards)}")
    mean = float(np.mean(scored)) if scored else 0.0
    return [None if reward is None else reward - mean for reward in rewards]


def _spread(rewards: Sequence[float | None]) -> float:
    return float(np.std(_scored(rewards) or [0.0]))


def _scored(rewards: Sequence[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def dead_signal(metrics: Mapping[str, float]) -> str | None:
    """Why a step has nothing to learn from, by its metrics; None when it has."""
    if metrics["rollout/num_scored"] == 0:
        kinds = {k[12:]: int(v) for k, v in metrics.items() if k[12:] in get_args(OutcomeKind)}
        return f"no rollout was scored; how they ended: {kinds}"
    if metrics["sample/num_trained_tokens"] == 0:
        return "no scored rollout has a token to train: they made no call that counts (train.kinds)"
    if metrics["credit/zero_share"] == 1:
        reward = metrics["rollout/reward_mean"]
        return f"every advantage is zero: in each group all rewards are equal (mean {reward:.3f})"
    return None


def check_signal(settings: SignalConfig, *, reward_mean: float, mixed_share: float) -> None:
    """ConfigError when a start policy cannot learn: credit only amplifies what it already does.

    reward_mean: over the scored rollouts of the first step.
    mixed_share: share of its groups whose rewards differ.
    """
    found = f"The start policy has mean reward {reward_mean:.3f}, {mixed_share:.0%} of groups mixed"
    if not (reward_mean >= settings.min_reward and mixed_share >= settings.min_mixed):
        raise ConfigError(
            f"{found}; wanted at least {settings.min_reward:.2f} and {settings.min_mixed:.0%}. The "
            "task is too hard for it: give partial reward, easier tasks, an example in the prompt "
            "or supervised training first. signal.enabled=false trains all the same."
        )
    if reward_mean > settings.max_reward:
        raise ConfigError(
            f"{found}; wanted at most {settings.max_reward:.2f}. There is little left to learn: "
            "take harder tasks. signal.enabled=false trains all the same."
        )
