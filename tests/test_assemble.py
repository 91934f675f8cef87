"""Assembly is one function on tables: whole rollouts in, their samples out, none too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_ray.assemble import assemble, calls_table
from lightning_ray.config import TrainConfig
from lightning_ray.errors import ConfigError
from lightning_ray.samples import build_samples
from lightning_ray.schema import Sample, Trajectory, from_table, to_table
from tests.made import call, trajectory


def samples(*trajectories: Trajectory, **settings: object) -> list[Sample]:
    config = TrainConfig.model_validate(settings)
    return from_table(assemble(calls_table(trajectories), settings=config), Sample)


def test_a_table_of_calls_becomes_the_samples_of_its_rollouts_in_order() -> None:
    made = [trajectory(f"r{i}", group_id=f"g{i // 2}", num_calls=i + 1) for i in (3, 0, 2)]
    expected = [
        sample
        for t in made
        for sample in build_samples(
            t.calls, rollout_id=t.rollout.rollout_id, group_id=t.rollout.group_id
        )
    ]
    table = assemble(calls_table(made), settings=TrainConfig())
    assert table.equals(to_table(expected, Sample))
    assert [sample.rollout_id for sample in samples(*made)] == ["r3", "r0", "r2"]


def test_a_rollout_without_tokens_has_no_samples_and_costs_none_to_others() -> None:
    silent = replace(trajectory("silent"), calls=(call([1, 2], [], rollout_id="silent"),))
    absent = replace(trajectory("absent"), calls=())
    assert [s.rollout_id for s in samples(silent, trajectory("r"), absent)] == ["r"]
    assert samples(silent) == samples(absent) == []


def test_a_long_sample_is_cut_where_a_turn_ends() -> None:
    (whole,) = samples(trajectory(num_calls=3))  # 2 tokens, then turns of 3 and 1 between them
    assert len(whole.token_ids) == 13
    assert not whole.is_cut
    for limit, kept in ((13, 13), (12, 9), (9, 9), (8, 5), (5, 5)):
        (cut,) = samples(trajectory(num_calls=3), max_sample_tokens=limit)
        assert cut.token_ids.tolist() == whole.token_ids[:kept].tolist()
        assert cut.mask[-1]
        assert cut.is_cut == (kept < 13)
    assert samples(trajectory(num_calls=3), max_sample_tokens=4) == []


def test_a_rollout_with_a_long_sample_is_left_out_or_stops_the_run_as_the_config_says() -> None:
    pair = trajectory("long", num_calls=3), trajectory("short")
    found = samples(*pair, max_sample_tokens=12, too_long="mask")
    assert [sample.rollout_id for sample in found] == ["short"]
    with pytest.raises(ConfigError, match=r"`long` has a sample of 13 tokens.*is 12.*too_long"):
        samples(*pair, max_sample_tokens=12, too_long="fail")
