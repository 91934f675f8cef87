"""The tasks: name the package that a few words of its description mean, and what that is worth."""

import itertools
import random
from pathlib import Path
from typing import Any

from jobs.search.bm25 import Index, load, words

VALIDATION = 48
MIN_LENGTH = 3
COMMON = {"and", "are", "for", "from", "its", "like", "that", "the", "using", "with", "you", "your"}


def train() -> list[dict[str, Any]]:
    """Every package that is not kept for validation."""
    return _tasks()[VALIDATION:]


def validate() -> list[dict[str, Any]]:
    """The 48 packages that are only measured."""
    return _tasks()[:VALIDATION]


def train_shuffled() -> list[dict[str, Any]]:
    """As `train`, with hits in an order that says nothing, so that they have to be read."""
    return _shuffled(train())


def validate_shuffled() -> list[dict[str, Any]]:
    """As `validate`, with shuffled hits."""
    return _shuffled(validate())


def grade(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    """1 for the exact name in `answer.txt`, else 0."""
    answer = Path(workdir) / "answer.txt"
    if not answer.is_file():
        return 0.0
    return float(answer.read_text(errors="replace").strip() == task["answer"])


def keywords(text: str) -> str:
    """Two or three content words of a `name: description`, always the same ones."""
    name, _, description = text.partition(": ")
    chance = random.Random(name)
    content = [w for w in words(description) if len(w) >= MIN_LENGTH and w not in COMMON]
    number = min(chance.choice([2, 3]), len(content))
    return " ".join(content[i] for i in sorted(chance.sample(range(len(content)), number)))


def is_fair(text: str, index: Index) -> bool:
    """Whether its keywords find a text before all others, and two more behind it."""
    scores = dict(zip(index.texts, index.scores(keywords(text)), strict=True))
    best, second, third = sorted(scores.values())[-1:-4:-1]
    return scores[text] == best > second and third > 0


def _tasks() -> list[dict[str, Any]]:
    """One for each package, in a fixed random order; packages.py has seen that all are fair."""
    texts = load()
    random.Random(0).shuffle(texts)
    return [
        {
            "question": f"Which package: {keywords(text)}?",
            "answer": text.partition(": ")[0],
            "order": [0, 1, 2],
        }
        for text in texts
    ]


def _shuffled(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With each of the six orders equally often, so that no place is the right one more often."""
    orders = itertools.cycle(itertools.permutations(range(3)))
    return [{**task, "order": list(order)} for task, order in zip(tasks, orders, strict=False)]
