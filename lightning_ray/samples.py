"""Trajectory -> samples: calls whose prompts extend each other exactly are one sequence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lightning_ray.schema import Call, Sample


def build_samples(calls: Iterable[Call], *, rollout_id: str, group_id: str) -> list[Sample]:
    """The root-to-leaf sequences of a rollout; every sampled token is trained in exactly one.

    A call joins the longest open sequence that its prompt begins with, token for token; what the
    prompt adds is context (mask False). Any other call opens a sequence of its own: a sub-agent, a
    retry, a compaction, or a history the harness changed. Nothing is repaired. Calls without
    sampled tokens leave no trace.

    prompts [1,2]+[3], [1,2,3,4]+[5], [9]+[8]  ->  [1,2,3,4,5] and [9,8], with masks
    [0,0,1,0,1] and [0,1].
    """
    branches: list[_Branch] = []
    for call in sorted(calls, key=lambda call: (call.started_at, call.index)):
        if len(call.sampled_ids) == 0:
            continue
        matches = [branch for branch in branches if branch.leads_to(call.prompt_ids)]
        if matches:
            max(matches, key=len).extend(call)
        else:
            branches.append(_Branch(call))
    return [branch.sample(rollout_id, group_id) for branch in branches]


class _Branch:
    """One sequence that may still grow."""

    def __init__(self, call: Call) -> None:
        self._parts: list[Sequence[np.ndarray]] = []
        self._ids = np.zeros(0, np.int32)
        self.extend(call)

    def __len__(self) -> int:
        return len(self._ids)

    def leads_to(self, prompt_ids: np.ndarray) -> bool:
        n = len(self._ids)
        return len(prompt_ids) >= n and np.array_equal(prompt_ids[:n], self._ids)

    def extend(self, call: Call) -> None:
        added = call.prompt_ids[len(self._ids) :]
        self._parts.append(_context(added))
        trained = np.ones(len(call.sampled_ids), bool)
        self._parts.append((call.sampled_ids, trained, call.logprobs, call.versions))
        self._ids = np.concatenate([call.prompt_ids, call.sampled_ids])

    def sample(self, rollout_id: str, group_id: str) -> Sample:
        token_ids, mask, logprobs, versions = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        return Sample(
            rollout_id=rollout_id, group_id=group_id,
            token_ids=token_ids, mask=mask, logprobs=logprobs, versions=versions,
        )  # fmt: skip


def _context(token_ids: np.ndarray) -> Sequence[np.ndarray]:
    n = len(token_ids)
    return token_ids, np.zeros(n, bool), np.zeros(n, np.float32), np.full(n, -1, np.int32)
