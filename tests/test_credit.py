"""Credit is measured against a rollout's own group, by each estimator's formula."""

from __future__ import annotations

import math
import random
import re
import statistics
from dataclasses import replace

import pytest

from lightning_ray.config import SignalConfig, TrainConfig
from lightning_ray.credit import advantages, assigned, check_signal, dead_signal
from lightning_ray.errors import ConfigError
from tests.made import trajectory

ESTIMATORS = ["grpo", "dr_grpo", "rloo", "reinforce_baseline"]


def oracle(groups: list[list[float | None]], estimator: str) -> list[list[float]]:
    """The formulas, rollout by rollout."""
    scored = [[r for r in group if r is not None] for group in groups]
    centred = [[r - statistics.fmean(rs) for r in rs] for rs in scored]
    spread = statistics.pstdev([a for row in centred for a in row])
    result = []
    for group, rs in zip(groups, scored, strict=True):
        row = []
        for r in group:
            if r is None or len(set(rs)) < 2:
                row.append(0.0)
                continue
            a = r - statistics.fmean(rs)
            row.append(
                {
                    "grpo": a / (statistics.pstdev(rs) + 1e-6),
                    "dr_grpo": a,
                    "rloo": r - (sum(rs) - r) / (len(rs) - 1),
                    "reinforce_baseline": a / (spread + 1e-6),
                }[estimator]
            )
        result.append(row)
    return result


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_is_its_formula(estimator: str) -> None:
    dice = random.Random(0)
    for _ in range(50):
        groups: list[list[float | None]] = [
            [dice.choice([None, 0.0, 0.25, 1.0, dice.random()]) for _ in range(dice.randint(1, 8))]
            for _ in range(dice.randint(1, 5))
        ]
        groups.append([1.0, 0.0])
        for found, expected in zip(
            advantages(groups, estimator=estimator), oracle(groups, estimator), strict=True
        ):
            assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_every_estimator_of_the_config_is_tested() -> None:
    assert list(TrainConfig.model_fields["advantage"].annotation.__args__) == ESTIMATORS  # type: ignore[union-attr]


def test_each_reward_less_the_mean_of_its_group() -> None:
    groups = [[1.0, 0.0, 0.0, 1.0], [1.0, None, 0.0]]
    found = advantages(groups, estimator="dr_grpo")
    assert found == [[0.5, -0.5, -0.5, 0.5], [0.5, 0.0, -0.5]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("group", [[0.3, 0.3, 0.3], [0.1 + 0.2, 0.3], [1.0], [None, None], []])
def test_equal_rewards_and_groups_of_one_carry_no_signal(
    group: list[float | None], estimator: str
) -> None:
    assert advantages([group], estimator=estimator) == [[0.0] * len(group)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        advantages([[1.0, bad]], estimator="grpo")


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


def test_a_hook_gives_credit_to_rollouts_and_to_calls_by_their_own_numbers() -> None:
    first, second = trajectory(num_calls=2), trajectory(num_calls=3)
    recorded = replace(second, calls=second.calls[::-1])  # in the order they were recorded
    found = assigned(lambda ts, row: [row[0], [3.0, 2.0, 1.0]], [first, recorded], [0.5, -0.5])
    assert found == [0.5, [1.0, 2.0, 3.0]]


@pytest.mark.parametrize("given", [[0.5], [0.5, [1.0]], [0.5, math.nan], [0.5, 0.5, 0.5]])
def test_a_hook_that_gives_no_credit_for_something_is_refused(given: list[object]) -> None:
    pair = [trajectory(num_calls=2), trajectory(num_calls=3)]
    with pytest.raises(ConfigError, match=r"train.credit must return, for 2 rollouts .*\[2, 3\]"):
        assigned(lambda ts, row: given, pair, [0.5, -0.5])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"rollout/num_scored": 0.0, "rollout/num_timeout": 4.0}, "no rollout was scored.*timeout"),
        ({"sample/num_trained_tokens": 0.0}, "no scored rollout has a token to train"),
        ({"credit/zero_share": 1.0}, "every advantage is zero.*mean 0.250"),
    ],
)
def test_a_step_without_signal_says_why(changes: dict[str, float], words: str | None) -> None:
    metrics = {
        "rollout/num_scored": 8.0, "rollout/reward_mean": 0.25, "sample/num_trained_tokens": 90.0,
        "credit/zero_share": 0.5,
    }  # fmt: skip
    reason = dead_signal(metrics | changes)
    assert reason is None if words is None else re.search(words, reason or "")
