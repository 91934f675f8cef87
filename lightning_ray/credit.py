"""Rewards of a group -> advantages of its rollouts; whether there is any signal in them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lightning_ray.config import SignalConfig
from lightning_ray.errors import ConfigError


def center(rewards: Sequence[float | None], *, scale: bool) -> list[float]:
    """Group-relative advantages: each reward less the mean of the group's scored rollouts.

    rewards: None where a rollout is masked; its advantage is 0.0 and it moves no mean.
    scale:   also divide by the population standard deviation plus 1e-6 (GRPO, Shao et al. 2024,
             arXiv 2402.03300); without it, Dr.GRPO (Liu et al. 2025, arXiv 2503.20783).
    Raises ValueError when a reward is NaN or infinite.

    center([1.0, 0.0, None, 1.0, 0.0], scale=False)  ->  [0.5, -0.5, 0.0, 0.5, -0.5]
    """
    scored = np.array([reward for reward in rewards if reward is not None])
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards must be finite; got {list(rewards)}")
    if len(scored) == 0:
        return [0.0 for _ in rewards]
    mean, spread = float(scored.mean()), float(scored.std())
    divisor = spread + 1e-6 if scale else 1.0
    if math.isclose(spread, 0.0, abs_tol=1e-12):
        return [0.0 for _ in rewards]
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards]


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
