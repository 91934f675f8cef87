"""A program that lets a model find a number from 0 to 31 in at most five guesses.

It knows nothing of training: it finds its model through OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json

import openai

SYSTEM = "Find the number."
FIRST = "0-31"
MAX_GUESSES = 5


def main() -> None:
    """Read task.json, play, write guesses.json."""
    with open("task.json") as file:
        number = json.load(file)["number"]
    guesses = play(openai.OpenAI(), number)
    with open("guesses.json", "w") as file:
        json.dump(guesses, file)


def play(client: openai.OpenAI, number: int) -> list[str]:
    """What the model guessed, the last one right if it found the number."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    guesses: list[str] = []
    while len(guesses) < MAX_GUESSES:
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        guess = reply.choices[0].message.content or ""
        guesses.append(guess)
        answer = hint(guess, number)
        if answer == "=":
            break
        messages.append({"role": "assistant", "content": guess})
        messages.append({"role": "user", "content": answer})
    return guesses


def hint(guess: str, number: int) -> str:
    """`<` when the number is smaller than the guess, `>` when larger, `=`, or `?` for no number."""
    if not (guess.isascii() and guess.isdecimal()):
        return "?"
    if int(guess) == number:
        return "="
    return "<" if number < int(guess) else ">"


if __name__ == "__main__":
    main()
