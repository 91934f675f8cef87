"""Rollouts in this process: the calculator's agent, a sampler in place of gateway and engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import transformers

from jobs.calculator.agent import MAX_TURNS, SYSTEM, use_tool
from jobs.calculator.policy import Messages
from lightning_ray.schema import Call

MAX_TOKENS = 24
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Agent:
    """jobs/calculator/agent.py turned inside out: it is handed the model's answers.

    After a tool call it may forget: it then begins a new conversation, with the question and the
    last result as its only message.
    """

    def __init__(
        self, question: str, chance: random.Random, *, forgets: float = 0.0, turns: int = MAX_TURNS
    ) -> None:
        """forgets: chance of a new conversation after each tool call; turns: at most so many."""
        self.question = question
        self.conversations: list[Messages] = [_opening(question)]
        self.answer: str | None = None
        self.turns_left = turns
        self._chance, self._forgets = chance, forgets

    @property
    def messages(self) -> Messages:
        """The conversation as the model sees it."""
        return self.conversations[-1]

    @property
    def is_done(self) -> bool:
        """Whether there is an answer, or no turn left for one."""
        return self.answer is not None or self.turns_left == 0

    def take(self, text: str) -> str | None:
        """Go on with what the model said: the tool's last result, or None for an answer."""
        self.turns_left -= 1
        content, functions = _read(text)
        if not functions:
            self.answer = text
            return None
        calls = [{"type": "function", "function": function} for function in functions]
        self.messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        results = [use_tool(function["arguments"]) for function in functions]
        self.messages.extend({"role": "tool", "content": result} for result in results)
        if self._chance.random() < self._forgets and results[-1] != "error":
            expression = json.loads(functions[-1]["arguments"])["expression"]
            self.conversations.append(_opening(f"{self.question} {expression}={results[-1]}"))
        return results[-1]


class Sampler:
    """A copy of the model that samples many conversations at once."""

    def __init__(self, path: str) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.version = 0

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Sample by these weights from now on."""
        self.model.load_state_dict(weights)
        self.version = version

    def play(self, agents: Sequence[Agent], *, temperature: float) -> list[list[Call]]:
        """Lead every agent to its end; the calls of each. Temperature 0 is greedy."""
        calls: list[list[Call]] = [[] for _ in agents]
        while playing := [i for i, agent in enumerate(agents) if not agent.is_done]:
            prompts = [self._prompt(agents[i].messages) for i in playing]
            sampled = self._sample(prompts, temperature)
            for i, prompt, (ids, logprobs) in zip(playing, prompts, sampled, strict=True):
                calls[i].append(self._record(len(calls[i]), prompt, ids, logprobs))
                agents[i].take(self.tokenizer.decode(ids, skip_special_tokens=True))
        return calls

    def _prompt(self, messages: Messages) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )

    def _sample(
        self, prompts: Sequence[list[int]], temperature: float
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each prompt the ids that were sampled, the stop token included, and their logs."""
        rows = self.tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        made = self.model.generate(
            **rows, **(how if temperature else {"do_sample": False}),
            max_new_tokens=MAX_TOKENS, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        ids = made.sequences[:, rows["input_ids"].shape[1] :]
        table = torch.log_softmax(torch.stack(made.logits, 1).float() / (temperature or 1.0), -1)
        logs = table.gather(-1, ids[..., None]).squeeze(-1)
        stops = (ids == self.tokenizer.eos_token_id).cumsum(-1)
        lengths = ((stops == 0).sum(-1) + 1).clamp(max=ids.shape[1]).tolist()
        return [
            (row[:n].numpy().astype(np.int32), log[:n].numpy())
            for row, log, n in zip(ids, logs, lengths, strict=True)
        ]

    def _record(self, index: int, prompt: list[int], ids: np.ndarray, logprobs: np.ndarray) -> Call:
        return Call(
            call_id="", rollout_id="", attempt=0, index=index, dialect="in-process", status=200,
            error=None, prompt_ids=np.array(prompt, np.int32), sampled_ids=ids, logprobs=logprobs,
            versions=np.full(len(ids), self.version, np.int32), finish_reason="stop",
            started_at=0.0, duration_s=0.0, request=b"", response=b"",
        )  # fmt: skip


def _opening(text: str) -> Messages:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def _read(text: str) -> tuple[str, list[dict[str, str]]]:
    """What a tool parser makes of the model's text: content and calls; no calls if one is odd."""
    try:
        calls = [json.loads(call) for call in _CALL.findall(text)]
        functions = [
            {"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls
        ]
    except (ValueError, TypeError, KeyError):
        functions = []
    return text.partition("<tool_call>")[0] if functions else text, functions
