"""Rewards of a group -> advantages of its rollouts. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


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
