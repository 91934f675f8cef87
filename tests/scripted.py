"""A policy that plays a script: a logits processor in vLLM's core that forces given answers.

A tiny model cannot call tools, so a test says what it answers to what. `LR_TEST_SCRIPT` names a
JSON file with a list of `{"when": regex, "say": text}`; the first rule whose regex is found in what
is new to the policy (all that came after its last turn) decides, and a request that no rule fits is
left to the model. Everything else is real: each token is sampled, from a distribution that has only
one left. Reading the position off the output makes moves, preemption and sleep harmless.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

TURN = "<|im_start|>assistant\n"
END = "<|im_end|>"


class Scripted(LogitsProcessor):
    """Makes the model answer by the script."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(vllm_config.model_config.tokenizer)
        self._answers: dict[int, tuple[list[int], list[int]]] = {}
        """By row of the batch: the tokens to say, and the scheduler's list of those said."""
        self._rules: list[dict[str, str]] = []
        self._read_ns = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._answers, batch_update, self._answer)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, (tokens, said) in self._answers.items():
            if len(said) < len(tokens):  # a client that ignores the end of turn gets the model
                logits[row] = float("-inf")
                logits[row, tokens[len(said)]] = 0.0
        return logits

    def _answer(
        self, params: SamplingParams, prompt_ids: list[int] | None, said: list[int]
    ) -> tuple[list[int], list[int]] | None:
        self._read()
        news = what_is_new(self._tokenizer.decode(prompt_ids or []))
        for rule in self._rules:
            if re.search(rule["when"], news):
                text = rule["say"] + self._tokenizer.eos_token
                return self._tokenizer.encode(text, add_special_tokens=False), said
        return None

    def _read(self) -> None:
        path = Path(os.environ["LR_TEST_SCRIPT"])
        changed_ns = path.stat().st_mtime_ns if path.exists() else 0
        if changed_ns != self._read_ns:
            self._rules = json.loads(path.read_text()) if changed_ns else []
            self._read_ns = changed_ns


def what_is_new(prompt: str) -> str:
    """What a prompt holds after the last turn of the policy; all of it when there was none."""
    turns = prompt.removesuffix(TURN).split(TURN)
    return turns[0] if len(turns) == 1 else turns[-1].partition(END)[2]
