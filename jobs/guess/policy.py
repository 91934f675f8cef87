"""Makes the guessing game's start policy, as jobs.calculator.policy does for its own agent.

python -m jobs.guess.policy --out models/guess --seed 0
"""

import argparse
import random
from pathlib import Path

from jobs.calculator.policy import Messages, make_policy
from jobs.guess.agent import FIRST, MAX_GUESSES, SYSTEM, hint
from jobs.guess.tasks import NUMBERS

# One token each.
CONSTANTS = [SYSTEM, FIRST, *map(str, range(10, NUMBERS))]


def main() -> None:
    """Make, teach and save the policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/guess"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    games = [play(chance) for _ in range(8000)]
    make_policy(games, CONSTANTS, args.out, args.seed, updates=1000)


def play(chance: random.Random) -> Messages:
    """A conversation in the right format: the hints are heeded, most guesses are timid."""
    number = chance.randrange(NUMBERS)
    messages: Messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST},
    ]
    low, high = 0, NUMBERS - 1
    for _ in range(MAX_GUESSES):
        guess = chance.randint(low, high)
        if chance.random() < 0.6:  # close to an end of what is left
            guess = chance.choice([min(low + 1, high), max(low, high - 1)])
        messages.append({"role": "assistant", "content": str(guess)})
        answer = hint(str(guess), number)
        if answer == "=":
            break
        if answer == "<":
            high = min(high, guess - 1)
        else:
            low = max(low, guess + 1)
        messages.append({"role": "user", "content": answer})
    return messages


if __name__ == "__main__":
    main()
