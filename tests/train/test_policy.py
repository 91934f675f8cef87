"""The policy under DeepSpeed: one update is one update, however it is laid out and sharded."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_ray.config import Config, TrainConfig
from lightning_ray.errors import ConfigError
from lightning_ray.train.policy import (
    Policy,
    _check_layout,
    learning_rate,
)

ROOT = Path(__file__).parent.parent.parent
SIZES: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.3,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "mistral": functools.partial(transformers.MistralConfig, sliding_window=4),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: Any) -> str:
    """A folder with a model of that architecture."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    made = transformers.AutoModelForCausalLM.from_config(CONFIGS[request.param](**SIZES))
    made.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return str(folder)


def updates(cases: list[dict[str, Any]], *, num_ranks: int) -> list[dict[str, Any]]:
    """What each case comes to, on so many real ranks."""
    outputs = outputs_of(cases, num_ranks=num_ranks)
    for code, _, errors in outputs:
        assert code == 0, errors[-3000:]
    found: list[dict[str, Any]] = json.loads(outputs[0][1].splitlines()[-1])
    return found


def outputs_of(cases: list[dict[str, Any]], *, num_ranks: int) -> list[tuple[int, str, str]]:
    """Exit code and output of each rank."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.train.ranks", json.dumps(cases)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port),
                 "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"},
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=200) for process in ranks]
    return [(process.returncode, *both) for process, both in zip(ranks, outputs, strict=True)]


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_split_invariance_over_cuts_layouts_ranks_and_zero_stages(model: str) -> None:
    whole = {"model": model, "train": {"zero_stage": 1, "layout": "padded"}}
    cases = [
        {"model": model, "num_cuts": stage % 2 + 1,
         "train": {"zero_stage": stage, "layout": layout, "tokens_per_batch": limit}}
        for stage, layout, limit in [
            (0, "packed", 99), (2, "tree", 500), (2, "packed", 500), (3, "tree", 120),
            (1, "tree", 99), (3, "padded", 120),
        ]
    ]  # fmt: skip
    (expected, *one), two = updates([whole, *cases], num_ranks=1), updates(cases, num_ranks=2)
    for found in one + two:
        for before, after in zip(expected["metrics"], found["metrics"], strict=True):
            for name in ("loss", "grad_norm", "entropy", "logprob_gap_mean", "num_tokens"):
                value = before[f"train/{name}"]
                if not math.isnan(after[f"train/{name}"]):  # the norm, at stage 0
                    assert after[f"train/{name}"] == pytest.approx(value, rel=2e-6, abs=1e-6), name
        assert found["weights"] == pytest.approx(expected["weights"], rel=1e-6)


@pytest.mark.heavy
@pytest.mark.timeout(400)
@pytest.mark.parametrize("model", ["qwen3"], indirect=True)
def test_every_objective_trains_on_two_ranks_and_the_rollouts_ratio_is_over_both(
    model: str,
) -> None:
    objectives: list[dict[str, Any]] = [
        {"kind": "gspo"},
        {"kind": "cispo", "proximal": "recomputed", "correction": "rollout"},
        {"kind": "importance", "mean": "constant", "constant_tokens": 40},
        {"kl": 0.1, "kl_kind": "k3"},
    ]
    cases = [
        {"model": model, "num_cuts": 1,
         "train": {"objective": objective, "optimizer_steps": 2, "tokens_per_batch": 99}}
        for objective in objectives
    ]  # fmt: skip
    one, two = updates(cases, num_ranks=1), updates(cases, num_ranks=2)
    for alone, shared in zip(one, two, strict=True):
        for before, after in zip(alone["metrics"], shared["metrics"], strict=True):
            assert after == pytest.approx(before, rel=1e-4, abs=1e-5)
            assert after["train/num_optimizer_steps"] == 2.0
    kl = [row["train/kl"] for row in one[-1]["metrics"]]
    assert 0.0 < kl[0] < kl[1]  # the first of two steps begins at the reference itself
    assert {row["train/kl"] for case in one[:-1] for row in case["metrics"]} == {0.0}


@pytest.mark.heavy
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_frozen_parameters_stay_as_they_were(model: str) -> None:
    every, some = updates(
        [{"model": model, "train": {"frozen": frozen}}
         for frozen in ([], [r"embed", r"layers\.0\."])],
        num_ranks=1,
    )  # fmt: skip
    assert all(every["moved"].values())
    still = {name for name, has_moved in some["moved"].items() if not has_moved}
    assert still == {name for name in every["moved"] if "embed" in name or "layers.0." in name}
    for pattern, words in (("nothing", "no parameter matches"), ("", "leaves nothing to train")):
        case = {"model": model, "train": {"frozen": [pattern]}}
        ((code, _, errors),) = outputs_of([case], num_ranks=1)
        assert code != 0
        assert words in errors


@pytest.mark.heavy
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_what_is_offloaded_between_updates_changes_nothing(model: str) -> None:
    cases = [
        {"model": model, "train": {"offload": offload, "zero_stage": stage}}
        for stage in (1, 2) for offload in (False, True)
    ]  # fmt: skip
    found = updates(cases, num_ranks=1)
    assert found[0] == found[1]
    assert found[2] == found[3]


@pytest.mark.heavy
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_tokens_outside_the_policys_vocabulary_stop_every_rank(model: str) -> None:
    outputs = outputs_of([{"model": model, "train": {}, "vocabulary": 300}], num_ranks=2)
    for code, _, errors in outputs:
        assert code != 0
        assert "the engine's tokens must be in the policy's vocabulary of 200" in errors


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_checkpoint_of_another_architecture_is_refused(model: str, tmp_path: Path) -> None:
    class Loader(Policy):
        def __init__(self, config: Config) -> None:
            self.config, self._attention = config, "sdpa"

    config = Config.model_validate({"name": "x", "model": {"path": model, "dtype": "float32"}})
    shutil.copytree(model, tmp_path / "m")
    settings = json.loads((tmp_path / "m" / "config.json").read_text())
    for changes, words in (
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "of another architecture"),
        ({"model_type": "vit"}, "could not be loaded"),
        ({"hidden_size": 64}, "could not be loaded"),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ConfigError, match=words):
            Loader(config)._load(str(tmp_path / "m"))


def test_the_learning_rate_rises_and_falls_as_set() -> None:
    def rates(**fields: Any) -> list[float]:
        settings = TrainConfig(lr=1.0, num_steps=6, **fields)
        return [round(learning_rate(settings, version), 3) for version in range(7)]

    assert rates() == [1.0] * 7
    assert rates(warmup_steps=2) == [0.5, *[1.0] * 6]
    assert rates(warmup_steps=2, schedule="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert rates(schedule="linear", final_lr_share=0.4)[::3] == [1.0, 0.7, 0.4]
    assert rates(schedule="cosine")[::3] == [1.0, 0.5, 0.0]


@pytest.mark.heavy
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", ["mistral"], indirect=True)
def test_a_run_stops_before_it_learns_when_its_layout_changes_the_loss(model: str) -> None:
    packed = {"model": model, "train": {"layout": "packed"}}  # a row's mask hides the window
    ((code, _, errors),) = outputs_of([packed], num_ranks=1)
    assert code != 0
    assert "loss and gradient must not depend on how rollouts are laid out" in errors
    updates([{"model": model, "train": {"layout": "padded"}}], num_ranks=1)


def test_a_model_that_would_see_across_samples_is_refused() -> None:
    layers = ["linear_attention", "full_attention"]
    config = transformers.PretrainedConfig(layer_types=layers)
    for layout in ("packed", "tree"):
        with pytest.raises(ConfigError, match=r"linear_attention.*train\.layout=padded"):
            _check_layout(config, layout=layout)
    _check_layout(config, layout="padded")
    assert Config.model_fields["train"].default.layout == "packed"
