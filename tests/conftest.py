"""What tests share: one real stack of gateway, store and vLLM engine with a tiny model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_ray.config import Config

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ["HF_HUB_OFFLINE"] = "1"


@dataclass
class Stack:
    """A started run without harnesses."""

    config: Config
    parts: Any
    witness: Path
    """Where `tests.witness.Witness` writes what the sampler saw."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder, made in two seconds."""
    from tests.tiny import make_tiny_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make_tiny_model(tmp_path_factory.mktemp("tiny"), context=131072)


@pytest.fixture(scope="session")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Gateway and engine, open; every test of the session uses the same ones.

    LR_REPLY=live in the environment has streams answered as they are sampled.
    """
    # a client's clock of 3 s runs out before headers come, one of 2 s not after them
    gateway = {
        "headers_s": 3.5, "keep_alive_s": 1.0, "reply": os.environ.get("LR_REPLY", "recorded"),
    }  # fmt: skip
    with make_stack(tmp_path_factory.mktemp("stack"), tiny_model, gateway=gateway) as made:
        yield made


@contextmanager
def make_stack(folder: Path, model: Path, *, num_engines: int = 1, **more: Any) -> Iterator[Stack]:
    """A run without harnesses whose engines play scripts and are witnessed."""
    from lightning_ray.run import started

    os.environ["LR_TEST_WITNESS"] = str(folder / "witness.jsonl")
    os.environ["LR_TEST_SCRIPT"] = str(folder / "script.json")
    config = Config.model_validate(
        {
            "name": "stack",
            "runs": str(folder),
            "model": {"path": str(model), "dtype": "float32"},
            "engine": {
                "device": "cpu", "count": num_engines, "max_model_len": 131072,
                "kv_cache_bytes": 256 << 20,
                "args": ["--logits-processors", "tests.scripted:Scripted", "tests.witness:Witness"],
            },
            "collect": {"sampling": {"max_tokens": 600}},
            **more,
        }
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with started(config, say=lambda text: None) as parts:
            import ray

            ray.get(parts.gate.open.remote())
            yield Stack(config, parts, folder / "witness.jsonl")
