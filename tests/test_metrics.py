"""Each step's numbers, and where they go."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_ray.collect import Group
from lightning_ray.config import Config
from lightning_ray.errors import ConfigError
from lightning_ray.metrics import Journal, summarise
from lightning_ray.run import _check
from lightning_ray.samples import build_samples
from lightning_ray.train.batch import pack
from lightning_ray.train.loop import credited, describe, shares
from tests.made import trajectory


def config(folder: Path, **fields: Any) -> Config:
    made = Config.model_validate(
        {"name": "run", "runs": str(folder), "model": {"path": str(folder)}, **fields}
    )
    made.run_dir.mkdir(exist_ok=True)
    return made


def test_a_step_is_summed_up_by_rollout_group_and_token() -> None:
    rewards = [[1.0, 0.0, None], [0.5, 0.5], [1.0, None, None]]
    groups = [
        Group(0, tuple(
            trajectory(f"{g}-{i}", group_id=str(g), reward=reward, num_calls=0 if g == 1 else 2)
            for i, reward in enumerate(row)
        ))
        for g, row in enumerate(rewards)
    ]  # fmt: skip
    scored, credits = credited(groups, Config.model_fields["train"].default)
    assert [t.rollout.rollout_id for t in scored] == ["0-0", "0-1", "1-0", "1-1", "2-0"]
    assert list(credits.values()) == pytest.approx([1, -1, 0, 0, 0], abs=1e-5)
    samples = [
        sample for t in scored
        for sample in build_samples(t.calls, rollout_id=t.rollout.rollout_id, group_id="g")
    ]  # fmt: skip
    found = summarise([group.trajectories for group in groups], samples)
    expected = {
        "rollout/reward_mean": 0.6, "rollout/group_reward_std_mean": 0.5 / 3, "rollout/num": 8.0,
        "rollout/num_scored": 5.0, "rollout/num_without_samples": 2.0, "rollout/num_lone": 1.0,
        "rollout/mixed_groups_share": 1 / 3, "rollout/num_ok": 8.0, "sample/num": 3.0,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected)

    batches = pack(samples, advantages=credits, version=3, tokens_per_batch=99)
    found = describe(samples, credits, [batches], version=3)
    expected = {
        "credit/zero_share": 0.6, "sample/num_trained_tokens": 18.0,
        "sample/num_context_tokens": 9.0, "sample/num_unique_tokens": 9.0, "sample/num_cut": 0.0,
        "sample/token_age_mean": 2.5, "sample/token_age_max": 3.0, "sample/padding_share": 0.0,
        "credit/advantage_std": np.std([1, -1, 0, 0, 0]),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    nothing = describe([], {}, [], version=3)
    assert nothing["credit/zero_share"] == 1.0
    assert all(np.isfinite(value) for value in nothing.values())


def test_a_steps_time_is_shared_out() -> None:
    spent = {"time/collect_s": 6.0, "time/build_s": 1.0, "time/update_s": 2.0, "time/sleep_s": 1.0}
    assert shares(spent, wall_s=10.0) == {
        "engine/asleep_share": pytest.approx(0.3), "train/idle_share": pytest.approx(0.6),
    }  # fmt: skip


def test_the_journal_is_read_back_and_only_its_writer_writes(tmp_path: Path) -> None:
    made = config(tmp_path)
    Journal(made, is_writer=False).write(0, 0, {"a/b": 1.0})
    assert not (made.run_dir / "metrics.jsonl").exists()
    journal = Journal(made, is_writer=True)
    journal.write(1, 2, {"a/b": 1.0})
    journal.close()
    (line,) = (made.run_dir / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert (row["step"], row["version"], row["a/b"]) == (1, 2, 1.0)
    assert list((made.run_dir / "tensorboard").iterdir())


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_metrics_go_where_the_config_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = config(tmp_path, track=[name])
    journal = Journal(made, is_writer=True)
    journal.write(0, 0, {"a/b": 1.0})
    journal.close()
    assert any("offline-run" in str(p) or p.name == "mlflow.db" for p in made.run_dir.rglob("*"))


def test_what_is_not_installed_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="track: mlflow is not installed; `pip install mlflow`"):
        _check(config(tmp_path, track=["mlflow"]))
