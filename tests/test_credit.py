"""Credit is centred over a group's scored rollouts."""

from __future__ import annotations

import math

import pytest

from lightning_ray.config import SignalConfig
from lightning_ray.credit import center, check_signal
from lightning_ray.errors import ConfigError


def test_each_reward_less_the_mean() -> None:
    assert center([1.0, 0.0, 0.0, 1.0], scale=False) == [0.5, -0.5, -0.5, 0.5]


def test_scaled_by_the_population_deviation() -> None:
    assert center([1.0, 0.0], scale=True) == pytest.approx([1.0, -1.0], abs=1e-5)


def test_a_masked_rollout_gets_nothing_and_moves_no_mean() -> None:
    assert center([1.0, None, 0.0], scale=False) == [0.5, 0.0, -0.5]
    assert center([None, None], scale=True) == [0.0, 0.0]


def test_equal_rewards_and_groups_of_one_carry_no_signal() -> None:
    assert center([0.3, 0.3, 0.3], scale=True) == [0.0, 0.0, 0.0]
    assert center([1.0], scale=True) == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        center([1.0, bad], scale=True)


def test_a_start_policy_that_can_learn_passes_the_signal_gate() -> None:
    check_signal(SignalConfig(), reward_mean=0.2, mixed_share=0.5)


@pytest.mark.parametrize(
    ("reward", "mixed", "words"),
    [
        (0.0, 0.0, "too hard"),
        (0.2, 0.1, "too hard"),
        (math.nan, 0.0, "too hard"),
        (0.9, 0.5, "little left"),
    ],
)
def test_one_that_cannot_is_told_what_to_change(reward: float, mixed: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_signal(SignalConfig(), reward_mean=reward, mixed_share=mixed)
