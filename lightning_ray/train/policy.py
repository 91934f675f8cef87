"""The policy on this rank: model and optimiser under DeepSpeed, from load to checkpoint."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_ray.config import Config, TrainConfig
from lightning_ray.errors import ConfigError, boundary
from lightning_ray.schema import Batch
from lightning_ray.train.attention import ROWS, blocks, is_plain, spans
from lightning_ray.train.loss import Loss, correction, divergence, policy_loss

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
import transformers
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

# DeepSpeed 0.19 would compile a C++ all-reduce for CPUs at the first start, a minute; gloo has one
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_Tensors = dict[str, Any]
"""The columns of a Batch on the device."""


class Policy:
    """A causal language model being trained; every rank of the group holds one."""

    def __init__(self, config: Config, *, path: str | None = None, version: int = 0) -> None:
        """Load from `path`, by default the run's start model; `version` steps are behind it."""
        self.config = config
        self.version = version
        source = path or config.model.path
        self._kept: torch.Tensor | None = None
        tree = "flex_attention" if torch.cuda.is_available() else ROWS
        kinds = {"padded": "sdpa", "packed": ROWS, "tree": tree}
        self._attention = kinds[config.train.layout]
        model = self._load(source)
        _check_layout(model.config, layout=config.train.layout)
        _freeze(model, config.train.frozen)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self.tied = bool(model.config.tie_word_embeddings)
        settings = config.train
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
        )
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=_deepspeed_config(config)
        )
        self.device = self.engine.device
        self._reference = None
        if config.train.objective.kl:
            self._reference = self._load(config.model.path).requires_grad_(False).to(self.device)
        self._offload()

    def update(self, parts: Sequence[Sequence[Batch]]) -> dict[str, float]:
        """An optimiser step for each part, over all ranks; metrics are the same on every rank."""
        self._check_vocabulary([batch for part in parts for batch in part])
        if self.config.train.offload:
            self.engine.reload_states()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.train, self.version)
        self.engine.train()
        tensors = [[self._tensors(batch) for batch in part] for part in parts]
        proximal = [[self._proximal(batch) for batch in part] for part in tensors]
        totals, gaps = Counter[str](), list[torch.Tensor]()
        for part, before in zip(tensors, proximal, strict=True):
            self._step(part, before, totals, gaps)
        self.version += 1
        self._offload()
        sums = self._over_ranks(totals)
        tokens = max(sums["num_tokens"], 1.0)
        gradient_norm = self.engine.get_global_grad_norm()
        return {
            "train/loss": sums["loss"] / len(parts),
            "train/num_tokens": sums["num_tokens"],
            "train/num_optimizer_steps": float(len(parts)),
            **self._gap(gaps),
            "train/ratio_mean": sums["ratio"] / tokens,
            "train/clipped_low_share": sums["clipped_low"] / tokens,
            "train/clipped_high_share": sums["clipped_high"] / tokens,
            "train/corrected_share": sums["corrected"] / tokens,
            "train/entropy": sums["entropy"] / tokens,
            "train/kl": sums.get("kl", 0.0) / len(parts),
            "train/grad_norm": float(gradient_norm) if gradient_norm is not None else math.nan,
            "train/lr": self.engine.get_lr()[0],
        }

    def check_split(self, batches: Sequence[Batch], others: Sequence[Batch]) -> None:
        """ConfigError when two layouts of the same rollouts differ in loss or gradient."""
        near = 1e-4 if self.config.model.dtype == "float32" else 2e-2
        (loss, gradient, _), (alone, expected, size) = self._probe(batches), self._probe(others)
        off = torch.stack([(loss - alone).abs(), (gradient - expected).norm()])
        if bool((off <= near * size).all()):
            return
        raise ConfigError(
            "loss and gradient must not depend on how rollouts are laid out; those of the first "
            f"samples are {loss:.6g} and {gradient.norm():.6g} as the config says (train.layout), "
            f"{alone:.6g} and {expected.norm():.6g} one by one. This model looks across the "
            "samples of a row: set train.layout=padded."
        )

    def _probe(self, batches: Sequence[Batch]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Loss of an optimiser step over all ranks; its gradient in the last vector of weights (0
        with ZeRO 3, which keeps it in pieces); [2] how large the terms are that they are sums of.
        Nothing is moved."""
        self._check_vocabulary(batches)
        self.engine.train()
        part = [self._tensors(batch) for batch in batches]
        proximal = [self._proximal(batch) for batch in part]
        ratios = self._rollout_ratios(part, proximal)
        parameters = self.engine.module.parameters()
        vector = [p for p in parameters if p.dim() == 1 and p.requires_grad][-1]
        gradient = torch.zeros(1 if self._is_sharded() else len(vector), device=self.device)
        total, size = torch.zeros(1, device=self.device), torch.zeros(2, device=self.device)
        for batch, before in zip(part, proximal, strict=True):
            # past DeepSpeed's engine, which would take a gradient for one of an update
            with torch.set_grad_enabled(not self._is_sharded()):
                loss, _ = self._loss(batch, before, ratios, self.engine.module)
            total += loss.value.detach()
            size[0] += (batch["weights"] * batch["advantages"]).abs().sum()
            if not self._is_sharded():
                (own,) = torch.autograd.grad(loss.value, vector)
                gradient += own
                size[1] += own.norm()
        if self.engine.world_size > 1:
            for tensor in (total, gradient, size):
                torch.distributed.all_reduce(tensor)
        return total[0], gradient, size

    def logprobs(
        self, batch: _Tensors, model: torch.nn.Module | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[N] log-prob of each trained token under the run's temperature; [N] the entropy there.

        Logits are made at the N places only: memory grows with N x V, not with B x T x V.
        """
        self._kept = batch["previous"]
        logits = (model or self.engine)(
            input_ids=batch["token_ids"],
            position_ids=batch["positions"],
            **self._seen(batch["ends"]),
        ).logits
        self._kept = None
        table = torch.log_softmax(logits.float() / self.config.collect.sampling.temperature, -1)
        chosen = table.gather(-1, batch["targets"][:, None]).squeeze(-1)
        with torch.no_grad():
            return chosen, -(table.exp() * table).sum(-1)

    def _step(
        self,
        part: Sequence[_Tensors],
        proximal: Sequence[torch.Tensor],
        totals: Counter[str],
        gaps: list[torch.Tensor],
    ) -> None:
        """One optimiser step; adds to the sums of the update, and to its log-prob gaps."""
        ratios = self._rollout_ratios(part, proximal)
        is_first = not totals["num_steps"]  # later steps have moved the weights themselves
        for index, (batch, before) in enumerate(zip(part, proximal, strict=True)):
            self.engine.set_gradient_accumulation_boundary(index == len(part) - 1)
            loss, logprobs = self._loss(batch, before, ratios)
            # DeepSpeed takes the mean over ranks; the objective is a sum
            self.engine.backward(loss.value * self.engine.world_size)
            totals["loss"] += loss.value.item()
            totals["num_tokens"] += len(logprobs)
            totals.update({name: value.item() for name, value in loss.sums.items()})
            if is_first:
                gaps.append((logprobs.detach() - batch["logprobs"]).abs()[batch["fresh"]])
        totals["num_steps"] += 1
        self.engine.step()

    def _loss(
        self,
        batch: _Tensors,
        before: torch.Tensor,
        ratios: tuple[torch.Tensor, torch.Tensor],
        model: torch.nn.Module | None = None,
    ) -> tuple[Loss, torch.Tensor]:
        """A micro-batch's loss, with more sums; [N] its log-probs."""
        settings, rollouts = self.config.train.objective, batch["rollouts"]
        log_ratios, log_weights = ratios
        logprobs, entropy = self.logprobs(batch, model)
        trust, touched = correction(
            before - batch["logprobs"], settings, rollout_log_ratio=log_weights[rollouts]
        )
        loss = policy_loss(
            logprobs,
            proximal=before,
            advantages=batch["advantages"],
            weights=batch["weights"] * trust,
            settings=settings,
            rollout_log_ratio=log_ratios[rollouts],
        )
        loss.sums.update(entropy=entropy.sum(), corrected=touched.sum())
        if self._reference is None:
            return loss, logprobs
        with torch.no_grad():
            reference, _ = self.logprobs(batch, self._reference)
        kl = divergence(
            logprobs, reference=reference, weights=batch["weights"], kind=settings.kl_kind
        )
        return Loss(loss.value + settings.kl * kl, {**loss.sums, "kl": kl.detach()}), logprobs

    def _proximal(self, batch: _Tensors) -> torch.Tensor:
        """[N] the log-probs that ratios are taken to."""
        if self.config.train.objective.proximal == "sampled":
            return batch["logprobs"]
        with torch.no_grad():
            return self.logprobs(batch)[0]

    def _rollout_ratios(
        self, part: Sequence[_Tensors], proximal: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """By rollout of the step: mean log(current / proximal), and log(proximal / sampled) summed.

        The first costs a forward pass, and is made for gspo alone.
        """
        num_rollouts = max([batch["num_rollouts"] for batch in part], default=0)
        sums = torch.zeros(3, num_rollouts, device=self.device)
        for batch, before in zip(part, proximal, strict=True):
            rollouts = batch["rollouts"]
            if self.config.train.objective.kind == "gspo":
                with torch.no_grad():
                    sums[0].index_add_(0, rollouts, self.logprobs(batch)[0] - before)
            sums[1].index_add_(0, rollouts, before - batch["logprobs"])
            sums[2].index_add_(0, rollouts, torch.ones_like(before))
        if self.engine.world_size > 1:
            torch.distributed.all_reduce(sums)
        return sums[0] / sums[2].clamp(min=1.0), sums[1]

    def _load(self, source: str) -> Any:
        with boundary(
            ConfigError, f"model `{source}` could not be loaded", ValueError, RuntimeError
        ):
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=_DTYPES[self.config.model.dtype],
                attn_implementation=self._attention, output_loading_info=True,
            )  # fmt: skip
        if found["missing_keys"]:
            raise ConfigError(
                f"model `{source}` says it is a {type(model).__name__} and lacks "
                f"{len(found['missing_keys'])} of its weights, such as "
                f"{min(found['missing_keys'])}; its weights are of another architecture"
            )
        model.config.use_cache = False
        model.get_output_embeddings().register_forward_pre_hook(self._keep)
        return model

    def _seen(self, ends: torch.Tensor) -> dict[str, Any]:
        """What says to the model which tokens of a row a token sees."""
        if is_plain(ends):
            return {"attention_mask": (ends > 0).long()}
        if self._attention == ROWS:  # the model makes no mask where it is given one of four axes
            return {"attention_mask": ends.new_ones(1, 1, 1, 1), "row_spans": spans(ends)}
        return {"attention_mask": blocks(ends)}

    def _keep(self, module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before the output embedding: leave out the positions nothing is asked of."""
        return args if self._kept is None else (args[0].flatten(0, 1)[self._kept],)

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

    def _tensors(self, batch: Batch) -> _Tensors:
        columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
        return {
            name: torch.from_numpy(column).to(self.device)
            if isinstance(column, np.ndarray)
            else column
            for name, column in columns.items()
        }

    def _offload(self) -> None:
        """What only an update needs goes to the host's memory, if the config says so."""
        if self.config.train.offload:
            kinds = [
                kind for kind in OffloadStateTypeEnum if kind != OffloadStateTypeEnum.lp_params
            ]
            self.engine.offload_states(include=kinds, pin_memory=self.device.type != "cpu")

    def _check_vocabulary(self, batches: Sequence[Batch]) -> None:
        highest = max((int(batch.token_ids.max()) for batch in batches), default=0)
        size = self.engine.module.get_input_embeddings().num_embeddings
        if self._on_any_rank(highest >= size):
            raise ConfigError(
                f"the engine's tokens must be in the policy's vocabulary of {size}; one on this "
                f"rank is {highest}. Engine and policy must load the same model (engine.args)."
            )

    def _on_any_rank(self, condition: bool) -> bool:
        return self._over_ranks(Counter(found=int(condition)))["found"] > 0

    def _over_ranks(self, totals: Counter[str]) -> dict[str, float]:
        names = sorted(totals)
        values = torch.tensor([totals[name] for name in names], dtype=torch.float64)
        if self.device.type != "cpu":
            values = values.to(self.device, torch.float32)
        if self.engine.world_size > 1:
            torch.distributed.all_reduce(values)
        return dict(zip(names, values.tolist(), strict=True))

    def _gap(self, gaps: Sequence[torch.Tensor]) -> dict[str, float]:
        """How far engine and policy are apart on the tokens of the latest weights, on all ranks."""
        own = torch.cat([torch.zeros(0, device=self.device), *gaps]).cpu().numpy()
        parts: list[Any] = [own]
        if self.engine.world_size > 1:
            parts = [None] * self.engine.world_size
            torch.distributed.all_gather_object(parts, own)
        gap = np.concatenate(parts) if any(map(len, parts)) else np.zeros(1)
        return {
            "train/logprob_gap_mean": float(gap.mean(dtype=float)),
            "train/logprob_gap_p99": float(np.quantile(gap, 0.99)),
            "train/logprob_gap_max": float(gap.max()),
        }


def learning_rate(settings: TrainConfig, version: int) -> float:
    """Of the update that makes `version + 1`: a rise over `warmup_steps`, then `schedule`."""
    warm = min(1.0, (version + 1) / max(settings.warmup_steps, 1))
    span = max(settings.num_steps - settings.warmup_steps, 1)
    done = min(max(version - settings.warmup_steps, 0) / span, 1.0)
    left = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": (1.0 + math.cos(math.pi * done)) / 2,
    }[settings.schedule]
    final = settings.final_lr_share
    return settings.lr * warm * (final + (1.0 - final) * left)


def _check_layout(config: Any, *, layout: str) -> None:
    """ConfigError for a model whose layers would see across the samples of a packed row."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layout != "padded" and kinds != {"full_attention"}:
        raise ConfigError(
            f"train.layout={layout} needs full attention in every layer; this model has "
            f"{', '.join(sorted(kinds))}. Set train.layout=padded."
        )


def _freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Leave out of training the parameters whose names match one of the patterns."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(f"train.frozen: no parameter matches {pattern!r}; one is {names[0]}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in patterns))
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"train.frozen leaves nothing to train: {', '.join(patterns)}")


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
