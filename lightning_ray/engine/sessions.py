"""The earlier calls of the attempts an engine serves, which their next prompts continue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from lightning_ray.engine.continuation import Continued, Markers, Turn, continue_prompt
from lightning_ray.schema import Call

MAX_ATTEMPTS = 1024
MAX_TURNS = 64
"""Of one attempt: what a harness keeps open at once, not how long it runs."""


class Sessions:
    """By attempt, the turns that a prompt may continue.

    load: the recorded calls of an attempt, for one that another engine served so far.
    """

    def __init__(
        self,
        load: Callable[[str, int], Awaitable[Sequence[Call]]],
        *,
        markers: Markers,
        decode: Callable[[Sequence[int]], str],
        keep_reasoning: bool,
    ) -> None:
        self._load = load
        self._markers = markers
        self._decode = decode
        self._keep_reasoning = keep_reasoning
        self._turns: OrderedDict[str, list[Turn]] = OrderedDict()

    async def continued(self, call_key: str, rendered_ids: np.ndarray, limit: int) -> Continued:
        """What the model shall see for a prompt; as rendered when the sampled tokens, being more,
        would not fit into `limit` tokens."""
        turns = await self._of(call_key)
        continued = continue_prompt(
            rendered_ids, turns, markers=self._markers, decode=self._decode,
            keep_reasoning=self._keep_reasoning,
        )  # fmt: skip
        if len(continued.prompt_ids) >= limit > len(rendered_ids):
            return replace(continued, prompt_ids=rendered_ids, parent=None, reason="no_room")
        return continued

    def add(self, call_key: str, turns: Iterable[Turn]) -> None:
        """These calls were answered."""
        known = self._turns.get(_attempt(call_key))
        if known is not None:
            known += turns
            del known[:-MAX_TURNS]

    async def _of(self, call_key: str) -> list[Turn]:
        attempt = _attempt(call_key)
        if attempt not in self._turns:
            rollout_id, _, number = attempt.rpartition("/")
            calls = await self._load(rollout_id, int(number))
            turns = [_turn(call) for call in calls if len(call.sampled_ids)]
            self._turns.setdefault(attempt, turns[-MAX_TURNS:])
            while len(self._turns) > MAX_ATTEMPTS:
                self._turns.popitem(last=False)
        self._turns.move_to_end(attempt)
        return self._turns[attempt]


def _attempt(call_key: str) -> str:
    return call_key.rpartition("/")[0]


def _turn(call: Call) -> Turn:
    rendered = call.prompt_ids if call.rendered_ids is None else call.rendered_ids
    return Turn(rendered, call.prompt_ids, call.sampled_ids)
