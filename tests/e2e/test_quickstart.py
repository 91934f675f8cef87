"""The whole real path learns: harness, gateway, vLLM, store, DeepSpeed, new weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_ray.schema import Trajectory
from lightning_ray.store import read_trajectories

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parent.parent.parent


def train(folder: Path, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lightning_ray.cli", "train", "configs/quickstart.yaml",
         f"runs={folder}", *overrides],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def policy() -> Path:
    """The quickstart's start policy; made once, kept with the checkout."""
    folder = ROOT / "models" / "quickstart"
    if not (folder / "config.json").exists():
        subprocess.run(
            [sys.executable, "-m", "jobs.calculator.policy", "--out", str(folder)],
            cwd=ROOT, check=True,
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def run(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    process = train(folder)
    output, _ = process.communicate(timeout=1200)
    print(output)
    assert process.returncode == 0, output[-3000:]
    return folder / "quickstart"


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.timeout(1300)
def test_validation_reward_rises(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text())
    assert summary["validation_reward_first"] <= 0.30
    assert summary["validation_reward_last"] >= 0.60
    assert summary["num_steps"] == 15


def test_engine_and_policy_agree_on_log_probs_at_every_step(run: Path) -> None:
    gaps = [row["train/logprob_gap_mean"] for row in rows(run) if "train/logprob_gap_mean" in row]
    assert len(gaps) >= 10
    assert max(gaps) <= 1e-4


def test_each_publish_raises_the_version_that_samples_by_one(run: Path) -> None:
    by_step: dict[int, set[int]] = {}
    for trajectory in trajectories(run, "train"):
        for call in trajectory.calls:
            by_step.setdefault(trajectory.rollout.step, set()).update(call.versions.tolist())
    versions = [row["version"] for row in rows(run)]
    for step, found in by_step.items():
        assert found == {versions[step]}
    updates = [row for row in rows(run) if "train/loss" in row]
    assert versions[-1] == len(updates)


def test_after_a_publish_the_engine_answers_as_the_checkpoint_does(run: Path) -> None:
    import torch
    import transformers

    (checkpoint,) = (run / "checkpoints").glob("step-*")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    last = rows(run)[-1]
    compared = 0
    for trajectory in trajectories(run, "validate"):
        for call in trajectory.calls:
            if set(call.versions.tolist()) != {last["version"]} or compared > 2000:
                continue
            ids = np.concatenate([call.prompt_ids, call.sampled_ids])
            with torch.no_grad():
                logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
            table = torch.log_softmax(logits[len(call.prompt_ids) - 1 : -1], -1)
            chosen = torch.from_numpy(call.sampled_ids.astype(np.int64))
            ours = table.gather(-1, chosen[:, None])[:, 0]
            torch.testing.assert_close(ours, torch.tensor(call.logprobs), atol=1e-4, rtol=0)
            best = table.max(-1).values
            assert (best - ours).max() < 1e-4  # the greedy choice, up to a tie
            compared += len(chosen)
    assert compared > 500


def test_what_is_trained_is_what_was_sampled_in_one_piece(run: Path) -> None:
    """But for turns that vLLM's tool parser cut: a policy may learn to write on behind its call,
    which the parser drops, and the turn comes back as another."""
    for row in rows(run):
        if "sample/num" in row:
            num_cut = row.get("call/joined_turn_changed", 0.0)
            num_rollouts = row["sample/num"] / row["sample/num_per_rollout"]
            assert (row["sample/num"] - num_cut) / num_rollouts < 1.1


def test_the_run_folder_holds_what_the_readme_says(run: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    assert config["train"]["num_steps"] == 15
    assert list((run / "tensorboard").glob("events*"))
    assert list((run / "store").glob("calls-*.parquet"))
    shown = subprocess.run(
        [sys.executable, "-m", "lightning_ray.cli", "show", str(run)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert shown.returncode == 0
    assert "train" in shown.stdout


@pytest.mark.timeout(600)
def test_ctrl_c_stops_cleanly_and_leaves_no_process(policy: Path, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = train(tmp_path, "train.num_steps=1000", LR_TEST_MARK=mark)
    store = tmp_path / "quickstart" / "store"
    deadline = time.time() + 400
    while not (store.exists() and any(t.calls for t in read_trajectories(store))):
        assert process.poll() is None, process.communicate()[0][-3000:]
        assert time.time() < deadline
        time.sleep(1)
    asked_at = time.time()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    print(f"stopped {time.time() - asked_at:.1f} s after Ctrl-C")
    assert process.returncode == 130, output[-3000:]
    assert output.rstrip().endswith("lightning-ray: stopped")
    time.sleep(1)
    assert processes_with(mark) == []
    assert any(t.calls for t in read_trajectories(store))
    assert not list(store.glob("*.tmp"))


def processes_with(mark: str) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def trajectories(run: Path, mode: str) -> list[Trajectory]:
    return [t for t in read_trajectories(run / "store") if t.rollout.mode == mode]
