"""A search agent as people write them: finds the package that task.json asks for.

It knows nothing of training: it finds its model through OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json
import re

import bm25
import openai

SYSTEM = (
    "To find a package, first write <search>words</search>. "
    "Then read what was found and write <answer>name</answer>."
)
EXAMPLE = [
    {"role": "user", "content": "Which package: digital chess clock?"},
    {"role": "assistant", "content": "<search>digital chess clock</search>"},
    {
        "role": "user",
        "content": "Found:\ndreamchess: chess game with a view\nghronos: digital clock for chess\n"
        "tictac: clock with an alarm",
    },
    {"role": "assistant", "content": "<answer>ghronos</answer>"},
]
MAX_TURNS = 2


def main() -> None:
    """Read task.json, work, write answer.txt."""
    with open("task.json") as file:
        task = json.load(file)
    answer = solve(openai.OpenAI(), task["question"], task["order"])
    if answer is not None:
        with open("answer.txt", "w") as file:
            file.write(answer)


def solve(client: openai.OpenAI, question: str, order: list[int]) -> str | None:
    """The model's answer; None when it writes no tag, or has no answer after MAX_TURNS turns.

    order: in which the hits are shown; [0, 1, 2] is the best one first.
    """
    index = bm25.Index(bm25.load())
    messages = [{"role": "system", "content": SYSTEM}, *EXAMPLE]
    messages.append({"role": "user", "content": question})
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model="policy",
            messages=messages,
            max_tokens=24,
            stop=["</search>", "</answer>"],
            extra_body={"include_stop_str_in_output": True},  # as vLLM and SGLang understand it
        )
        text = reply.choices[0].message.content or ""
        if answer := inside("answer", text):
            return answer
        query = inside("search", text)
        if not query:
            return None
        hits = index.search(query)
        shown = [hits[place] for place in order if place < len(hits)]
        messages.append({"role": "assistant", "content": text})
        messages.append({"role": "user", "content": "\n".join(["Found:", *shown])})
    return None


def inside(tag: str, text: str) -> str | None:
    """What the first `tag` of a text holds."""
    found = re.search(f"<{tag}>(.+?)</{tag}>", text, re.DOTALL)
    return found and found[1].strip()


if __name__ == "__main__":
    main()
