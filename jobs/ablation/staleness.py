"""What old rollouts do to three objectives: ages of 0, 2 and 8 steps, five seeds.

    python -m jobs.ablation.staleness

Rollouts of step t are sampled by the weights of step t - age; see README.md beside this file. Goes
on where it was stopped.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from jobs.ablation.arms import Arm, Settings, run_arms
from jobs.ablation.report import draw, table

AGES = (0, 2, 8)
SEEDS = 5
SETTINGS = Settings(steps=30, lr=2e-4)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "naive": {"proximal": "sampled"},
    "decoupled": {"proximal": "recomputed", "correction": "token"},
    "uncorrected": {"proximal": "recomputed", "correction": "off"},
}
ARMS = [
    Arm(f"{name}, age {age}", objective, age=age)
    for age in AGES
    for name, objective in OBJECTIVES.items()
]
EXPLAINED = [
    "naive: ratio to the sampled log-probs",
    "decoupled: ratio to the recomputed, token weights",
    "uncorrected: ratio to the recomputed only",
]


def start_policy(seed: int) -> str:
    """The folder of the quickstart's start policy; made if missing."""
    folder = Path(f"models/quickstart-{seed}")
    if not (folder / "config.json").is_file():
        options = ["--out", str(folder), "--seed", str(seed)]
        subprocess.run([sys.executable, "-m", "jobs.calculator.policy", *options], check=True)
    return str(folder)


def main() -> None:
    """Run what is missing, print the table, draw the picture."""
    models = [start_policy(seed) for seed in range(SEEDS)]
    runs = run_arms(ARMS, SETTINGS, models, Path("runs/ablation/staleness"))
    others = {"sampled reward": "reward", "entropy": "train/entropy"}
    print(table(runs, others))
    panels = [
        [(f"{title}, age {age}", key, [f"{name}, age {age}" for name in OBJECTIVES])
         for age in AGES]
        for title, key in {"validation": "validation", **others}.items()
    ]  # fmt: skip
    draw(Path(__file__).with_suffix(".svg"), runs, panels, EXPLAINED)


if __name__ == "__main__":
    main()
