"""The control: credit that has nothing to do with what was done. Such a run must not learn."""

import random
from collections.abc import Sequence

from lightning_ray.schema import Trajectory


def permute(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> list[float]:
    """The group's advantages in an order drawn at random, always the same for a group.

    Rewards and their statistics stay as they are; only their link to the rollouts is cut.
    """
    permuted = list(advantages)
    random.Random(trajectories[0].rollout.group_id).shuffle(permuted)
    return permuted
