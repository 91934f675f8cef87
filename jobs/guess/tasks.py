"""The tasks of the guessing game: a number from 0 to 31, and what a game is worth."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.guess.agent import MAX_GUESSES, hint

NUMBERS = 32


def train() -> list[dict[str, Any]]:
    """The 32 numbers in a fixed random order."""
    numbers = random.Random(0).sample(range(NUMBERS), NUMBERS)
    return [{"number": number} for number in numbers]


def validate() -> list[dict[str, Any]]:
    """All 32 numbers; the policy never sees the number, so there is none to learn by heart."""
    return [{"number": number} for number in range(NUMBERS)]


def grade(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    """1 for a number that was found, else half the share of the information that was gained."""
    guesses = json.loads((Path(workdir) / "guesses.json").read_text())
    return score(task["number"], guesses)


def score(number: int, guesses: Sequence[str]) -> float:
    """What a list of guesses is worth."""
    low, high = 0, NUMBERS - 1
    for guess in guesses[:MAX_GUESSES]:
        answer = hint(guess, number)
        if answer == "=":
            return 1.0
        if answer == "<":
            high = min(high, int(guess) - 1)
        elif answer == ">":
            low = max(low, int(guess) + 1)
    return 0.5 * math.log2(NUMBERS / (high - low + 1)) / math.log2(NUMBERS)
