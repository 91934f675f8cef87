"""The quickstart's tasks: sums like `12+3*4`, and what an answer to one is worth."""

import random
from pathlib import Path
from typing import Any

VALIDATION = 128


def train() -> list[dict[str, Any]]:
    """Every sum that is not kept for validation, in a fixed random order."""
    return _tasks()[VALIDATION:]


def validate() -> list[dict[str, Any]]:
    """The 128 sums that are only measured."""
    return _tasks()[:VALIDATION]


def grade(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    """1 for the exact result in `answer.txt`, else 0."""
    answer = Path(workdir) / "answer.txt"
    if not answer.is_file():
        return 0.0
    return float(answer.read_text(errors="replace").strip() == task["answer"])


def _tasks() -> list[dict[str, Any]]:
    sums = [(a, b, c) for a in range(10, 100) for b in range(2, 10) for c in range(2, 10)]
    random.Random(0).shuffle(sums)
    return [{"question": f"{a}+{b}*{c}", "answer": str(a + b * c)} for a, b, c in sums]
