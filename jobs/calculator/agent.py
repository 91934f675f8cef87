"""An agent as people write them: answers the question in task.json with the help of a calculator.

It knows nothing of training: it finds its model through OPENAI_BASE_URL and OPENAI_API_KEY.
"""

import json

import openai

SYSTEM = "Calculate."
MAX_TURNS = 4
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Does one operation on two whole numbers, such as 3*4.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def main() -> None:
    """Read task.json, work, write answer.txt."""
    with open("task.json") as file:
        question = json.load(file)["question"]
    answer = solve(openai.OpenAI(), question)
    if answer is not None:
        with open("answer.txt", "w") as file:
            file.write(answer)


def solve(client: openai.OpenAI, question: str) -> str | None:
    """The model's answer, or None when it has none after MAX_TURNS turns."""
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": question},
    ]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(
            model="policy", messages=messages, tools=[CALCULATOR], max_tokens=24
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message)
        for call in message.tool_calls:
            result = use_tool(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None


def use_tool(arguments: str) -> str:
    """What the calculator says to a tool call; "error" to one it cannot read."""
    try:
        return calculate(json.loads(arguments)["expression"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return "error"


def calculate(expression: str) -> str:
    """The result of one operation on two whole numbers; "error" for anything else."""
    for sign, operation in {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}.items():
        left, _, right = expression.partition(sign)
        if left.isdecimal() and right.isdecimal():
            return str(operation(int(left), int(right)))
    return "error"


if __name__ == "__main__":
    main()
