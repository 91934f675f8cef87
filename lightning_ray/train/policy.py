"""The policy on this rank: model and optimiser under DeepSpeed, from load to checkpoint."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_ray.config import Config
from lightning_ray.schema import Batch
from lightning_ray.train.loss import policy_loss

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
import transformers

# DeepSpeed 0.19 would compile a C++ all-reduce for CPUs at the first start, a minute; gloo has one
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy:
    """A causal language model being trained; every rank of the group holds one."""

    def __init__(self, config: Config, *, path: str | None = None, version: int = 0) -> None:
        """Load from `path`, by default the run's start model; `version` steps are behind it."""
        self.config = config
        self.version = version
        source = path or config.model.path
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype=_DTYPES[config.model.dtype], attn_implementation="sdpa"
        )
        model.config.use_cache = False
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self.tied = bool(model.config.tie_word_embeddings)
        settings = config.train
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_deepspeed_config(config)
        )
        self.device = self.engine.device

    def update(self, batches: Sequence[Batch]) -> dict[str, float]:
        """One optimiser step over all ranks' batches; its metrics, the same on every rank."""
        self._set_learning_rate()
        self.engine.train()
        totals = Counter[str]()
        for index, batch in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            loss = self._loss(batch)
            # DeepSpeed takes the mean over ranks; the objective is a sum
            self.engine.backward(loss.value * self.engine.world_size)
            totals["loss"] += loss.value.item()
            totals.update({name: value.item() for name, value in loss.sums.items()})
        self.engine.step()
        self.version += 1
        sums = self._over_ranks(totals)
        tokens = max(sums["num_tokens"], 1.0)
        gradient_norm = self.engine.get_global_grad_norm()
        return {
            "train/loss": sums["loss"],
            "train/num_tokens": sums["num_tokens"],
            "train/logprob_gap_mean": sums["gap"] / max(sums["num_fresh"], 1.0),
            "train/ratio_mean": sums["ratio"] / tokens,
            "train/clipped_share": sums["clipped"] / tokens,
            "train/grad_norm": float(gradient_norm) if gradient_norm is not None else math.nan,
            "train/lr": self.engine.get_lr()[0],
        }

    def logprobs(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[B, T] log-prob of each token under the run's temperature; 0.0 for the first."""
        positions = torch.arange(token_ids.shape[1], device=self.device)
        attention_mask = (positions[None, :] < lengths[:, None]).long()
        logits = self.engine(input_ids=token_ids, attention_mask=attention_mask).logits
        logits = logits[:, :-1].float() / self.config.collect.sampling.temperature
        chosen = torch.log_softmax(logits, -1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(chosen, (1, 0))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight whole, in the checkpoint's names; every rank must exhaust it in step.

        The tensor is valid until the next one is taken.
        """
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self._is_sharded()):
                yield name, parameter.detach()

    def shapes(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, type and whole shape of what `parameters` gives, in its order."""
        return [
            (name, parameter.dtype, tuple(getattr(parameter, "ds_shape", parameter.shape)))
            for name, parameter in self.engine.module.named_parameters()
        ]

    def save(self, folder: Path) -> None:
        """A Hugging Face folder that any other tool can load; rank 0 writes, all ranks call."""
        weights = {name: tensor.cpu().clone() for name, tensor in self.parameters()}
        if self.engine.global_rank == 0:
            self.engine.module.save_pretrained(folder, state_dict=weights)
            self.tokenizer.save_pretrained(folder)

    def _is_sharded(self) -> bool:
        return self.config.train.zero_stage == 3

    def _loss(self, batch: Batch) -> Any:
        token_ids, lengths, mask, sampled, fresh, advantages, weights = (
            torch.from_numpy(np.ascontiguousarray(column)).to(self.device)
            for column in (
                batch.token_ids, batch.lengths, batch.mask, batch.logprobs,
                batch.fresh, batch.advantages, batch.weights,
            )
        )  # fmt: skip
        return policy_loss(
            self.logprobs(token_ids, lengths),
            sampled_logprobs=sampled,
            mask=mask,
            fresh=fresh,
            advantages=advantages,
            weights=weights,
            clip_low=self.config.train.clip_low,
            clip_high=self.config.train.clip_high,
        )

    def _set_learning_rate(self) -> None:
        settings = self.config.train
        warm = min(1.0, (self.version + 1) / max(settings.warmup_steps, 1))
        for group in self.engine.optimizer.param_groups:
            group["lr"] = settings.lr * warm

    def _over_ranks(self, totals: Counter[str]) -> dict[str, float]:
        values = torch.tensor(list(totals.values()), dtype=torch.float64)
        if self.device.type != "cpu":
            values = values.to(self.device, torch.float32)
        if self.engine.world_size > 1:
            torch.distributed.all_reduce(values)
        return dict(zip(totals, values.tolist(), strict=True))


def _deepspeed_config(config: Config) -> dict[str, Any]:
    """Micro-batches are ours: their weights already hold every mean, so DeepSpeed takes none."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.train.gradient_clipping,
        "zero_optimization": {"stage": config.train.zero_stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": config.model.dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }
