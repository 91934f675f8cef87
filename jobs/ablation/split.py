"""Advantages and means when a rollout is several samples: four arms, five seeds.

    python -m jobs.ablation.split

About the paper's ablation; see README.md beside this file. Goes on where it was stopped.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from jobs.ablation.arms import Arm, Settings, run_arms
from jobs.ablation.report import draw, table
from jobs.ablation.rollouts import Agent
from jobs.calculator import tasks
from jobs.calculator.policy import CONSTANTS, Messages, make_policy

SEEDS = 5
SETTINGS = Settings(steps=40, lr=2e-4, forgets=0.5, turns=6)
ARMS = [
    Arm("rollout advantage, rollout mean", {"mean": "rollout_mean"}),
    Arm("rollout advantage, token mean", {"mean": "token_mean"}),
    Arm("sample advantage, token mean", {"mean": "token_mean"}, by_sample=True),
    Arm("sample advantage, sample mean", {"mean": "rollout_mean"}, by_sample=True),
]


def start_policy(seed: int) -> str:
    """The folder of a policy that knows the forgetful agent's format; made if missing."""
    folder = Path(f"models/ablation-split-{seed}")
    if not (folder / "config.json").is_file():
        chance = random.Random(seed)
        games = [
            conversation
            for task in chance.choices(tasks.train(), k=8000)
            for conversation in play(task["question"], chance)
        ]
        make_policy(games, CONSTANTS, folder, seed, updates=700)
    return str(folder)


def play(question: str, chance: random.Random) -> list[Messages]:
    """Conversations in the right format: it stops too early, or cannot stop."""
    agent = Agent(question, chance, forgets=SETTINGS.forgets, turns=SETTINGS.turns)
    a, product = question.split("+")
    dice = chance.random()
    if dice < 0.1:  # a guess
        answer: str | None = str(chance.randint(5, 180))
    elif dice < 0.25:  # as if `*` did not go first
        answer = agent.take(_call(question.split("*")[0]))
    else:
        answer = agent.take(_call(product))
        while chance.random() < 0.4 and agent.turns_left > 1:  # once would be right
            answer = agent.take(_call(f"{a}+{answer}"))
    agent.messages.append({"role": "assistant", "content": answer})
    return agent.conversations


def _call(expression: str) -> str:
    function = {"name": "calculator", "arguments": {"expression": expression}}
    return f"<tool_call>{json.dumps(function)}</tool_call>"


def main() -> None:
    """Run what is missing, print the table, draw the picture."""
    models = [start_policy(seed) for seed in range(SEEDS)]
    runs = run_arms(ARMS, SETTINGS, models, Path("runs/ablation/split"))
    others = {
        "sampled reward": "reward",
        "entropy": "train/entropy",
        "samples per rollout": "samples",
    }
    print(table(runs, others))
    panels = [
        (title, key, list(runs)) for title, key in {"validation": "validation", **others}.items()
    ]
    draw(Path(__file__).with_suffix(".svg"), runs, [panels[:2], panels[2:]], list(runs))


if __name__ == "__main__":
    main()
