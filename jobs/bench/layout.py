"""One update of a group whose rollouts begin with the same harness prompt, in each layout.

    python -m jobs.bench.layout

Eight rollouts: a prompt of 2,000 tokens in common, then ten turns of their own (an answer of 50
tokens, a result of 100). The model is a Llama of SmolLM2's width, random weights, few layers.
Tokens in the rows are counted against those of the tree that holds each beginning once; seconds
are those of a whole update under DeepSpeed, the best of two, ratios within this run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29571")

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table

from jobs.calculator.policy import make_tokenizer
from lightning_ray.config import Config
from lightning_ray.schema import Sample
from lightning_ray.train.batch import num_unique, pack
from lightning_ray.train.policy import Policy

GROUP, PROMPT, TURNS, ANSWER, RESULT, VOCABULARY = 8, 2000, 10, 50, 100, 49152


def main() -> None:
    """Measure each layout, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens-per-batch", type=int, default=16384)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    samples = make_group(np.random.default_rng(0))
    unique = num_unique(samples)
    report = Table("layout", "rows", "tokens in rows", "per unique token", "seconds", "ratio")
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), options.layers)
        for layout in ("padded", "packed", "tree"):
            train = {"layout": layout, "tokens_per_batch": options.tokens_per_batch}
            model = {"path": folder, "dtype": "float32"}
            policy = Policy(Config.model_validate({"name": "x", "model": model, "train": train}))
            batches = pack(
                samples, advantages={s.rollout_id: 1.0 for s in samples}, version=0,
                tokens_per_batch=options.tokens_per_batch, layout=layout,
            )  # fmt: skip
            spent = min(seconds(policy, batches) for _ in range(2))
            first = first or spent
            size = sum(batch.token_ids.size for batch in batches)
            shapes = " + ".join("{} x {}".format(*batch.token_ids.shape) for batch in batches)
            report.add_row(
                layout, shapes, f"{size:,}", f"{size / unique:.2f}", f"{spent:.1f}",
                f"{first / spent:.2f}",
            )  # fmt: skip
    Console().print(report)


def make_group(rng: np.random.Generator) -> list[Sample]:
    """Eight samples that part with their first answer."""
    prompt = rng.integers(0, VOCABULARY, PROMPT, np.int32)
    length = TURNS * (ANSWER + RESULT)
    mask = np.arange(PROMPT + length) >= PROMPT
    mask &= (np.arange(PROMPT + length) - PROMPT) % (ANSWER + RESULT) < ANSWER
    return [
        Sample(
            rollout_id=f"r{i}", group_id="g", mask=mask,
            token_ids=np.concatenate([prompt, rng.integers(0, VOCABULARY, length, np.int32)]),
            logprobs=np.where(mask, -10.8, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            calls=np.where(mask, 0, -1).astype(np.int32),
        )
        for i in range(GROUP)
    ]  # fmt: skip


def make_model(folder: Path, layers: int) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=8192,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    make_tokenizer([]).save_pretrained(folder)  # a policy has one; here it is not used


def seconds(policy: Policy, batches: list) -> float:
    started = time.perf_counter()
    policy.update([batches])
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
