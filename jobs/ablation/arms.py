"""One arm of an experiment: a training run in this process, its steps kept as JSON lines."""

from __future__ import annotations

import json
import os
import random
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch

from jobs.ablation.rollouts import Agent, Sampler
from jobs.calculator import tasks
from jobs.calculator.agent import MAX_TURNS
from lightning_ray.config import Config
from lightning_ray.credit import advantages
from lightning_ray.samples import build_samples
from lightning_ray.schema import Sample
from lightning_ray.train.batch import pack
from lightning_ray.train.policy import Policy

Row = dict[str, Any]
Runs = dict[str, list[list[Row]]]
"""By arm, the rows of each seed."""


@dataclass(frozen=True)
class Settings:
    """What the arms of an experiment have in common."""

    steps: int
    lr: float
    groups: int = 8
    group_size: int = 8
    forgets: float = 0.0
    turns: int = MAX_TURNS


@dataclass(frozen=True)
class Arm:
    """What is compared."""

    name: str
    objective: dict[str, Any]
    by_sample: bool = False
    """Every sample counts as a rollout of its own, with its rollout's reward."""
    age: int = 0
    """Rollouts of step t are sampled by the weights of step t - age."""


def run_arms(arms: Sequence[Arm], settings: Settings, models: Sequence[str], out: Path) -> Runs:
    """Every arm from every start model, a seed each; what is complete in `out` is not run again."""
    out.mkdir(parents=True, exist_ok=True)
    _init_alone()
    runs: Runs = {arm.name: [] for arm in arms}
    for seed, model in enumerate(models):
        for arm in arms:
            path = out / f"{'-'.join(re.findall('[a-z0-9]+', arm.name))}-{seed}.jsonl"
            rows = [json.loads(line) for line in path.open()] if path.exists() else []
            if not rows or rows[-1]["step"] < settings.steps:
                rows = []
                with path.open("w") as file:
                    for row in _train(arm, settings, model, seed):
                        rows.append({"arm": arm.name, "seed": seed, **row})
                        file.write(json.dumps(rows[-1]) + "\n")
                        file.flush()
                print(f"{arm.name}, seed {seed}: {rows[-1]['validation']:.3f}", flush=True)
            runs[arm.name].append(rows)
    return runs


def _train(arm: Arm, settings: Settings, model: str, seed: int) -> Iterator[Row]:
    """A row for the start and one after each step."""
    torch.manual_seed(seed)
    config = Config.model_validate(
        {"name": "ablation", "model": {"path": model, "dtype": "float32"},
         "train": {"lr": settings.lr, "objective": arm.objective}}
    )  # fmt: skip
    policy, sampler = Policy(config), Sampler(model)
    history = [(0, _weights(policy))]
    yield {"step": 0, "validation": _validate(sampler, settings)}
    for step in range(settings.steps):
        version, weights = history[max(0, step - arm.age)]
        sampler.load(weights, version)
        row, samples, credits = _collect(sampler, arm, settings, f"{seed}/{step}")
        batches = pack(
            samples, advantages=credits, version=policy.version, settings=config.train.objective,
            tokens_per_batch=config.train.tokens_per_batch,
        )  # fmt: skip
        if batches:  # else every group had one reward
            row |= policy.update([batches])
        history.append((policy.version, _weights(policy)))
        sampler.load(history[-1][1], policy.version)
        yield {"step": step + 1, **row, "validation": _validate(sampler, settings)}


def _collect(
    sampler: Sampler, arm: Arm, settings: Settings, key: str
) -> tuple[Row, list[Sample], dict[str, float]]:
    """What a step's rollouts were like, their samples, and the credit of each rollout_id."""
    chance = random.Random(key)
    asked = [
        task
        for task in chance.sample(tasks.train(), settings.groups)
        for _ in range(settings.group_size)
    ]
    agents = [_agent(task, settings, chance.random()) for task in asked]
    played = sampler.play(agents, temperature=1.0)
    rewards = [_reward(agent, task) for agent, task in zip(agents, asked, strict=True)]
    samples: list[Sample] = []
    scored: list[dict[str, float | None]] = [{} for _ in range(settings.groups)]
    for i, (calls, reward) in enumerate(zip(played, rewards, strict=True)):
        group = i // settings.group_size
        made = build_samples(calls, rollout_id=str(i), group_id=str(group))
        if arm.by_sample:
            made = [replace(sample, rollout_id=f"{i}/{k}") for k, sample in enumerate(made)]
        scored[group] |= {sample.rollout_id: reward for sample in made}
        samples += made
    credited = advantages([list(group.values()) for group in scored], estimator="grpo")
    credits = {
        name: credit
        for group, row in zip(scored, credited, strict=True)
        for name, credit in zip(group, row, strict=True)
    }
    described = {
        "reward": sum(rewards) / len(rewards),
        "turns": sum(map(len, played)) / len(played),
        "samples": len(samples) / len(played),
    }
    return described, samples, credits


def _validate(sampler: Sampler, settings: Settings) -> float:
    """Mean reward of greedy play on the tasks that are only measured; always the same chances."""
    asked = tasks.validate()
    agents = [_agent(task, settings, i) for i, task in enumerate(asked)]
    sampler.play(agents, temperature=0.0)
    return sum(map(_reward, agents, asked)) / len(asked)


def _agent(task: dict[str, Any], settings: Settings, seed: float) -> Agent:
    return Agent(
        task["question"], random.Random(seed), forgets=settings.forgets, turns=settings.turns
    )


def _reward(agent: Agent, task: dict[str, Any]) -> float:
    return float((agent.answer or "").strip() == task["answer"])


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.parameters()}


def _init_alone() -> None:
    """DeepSpeed's one process, on the CPU."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    deepspeed.init_distributed("gloo", verbose=False)
