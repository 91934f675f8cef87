"""Trajectory -> samples: calls whose prompts extend each other exactly are one sequence. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_ray.errors import ConfigError
from lightning_ray.schema import Call, Sample, common_prefix

TRAINED_KINDS = ("main", "subagent", "compaction")


def build_samples(
    calls: Iterable[Call],
    *,
    rollout_id: str,
    group_id: str,
    kinds: Collection[str] = TRAINED_KINDS,
) -> list[Sample]:
    """The root-to-leaf sequences of a rollout; every sampled token is trained in exactly one.

    A call joins the longest open sequence that its prompt begins with, token for token; what the
    prompt adds is context (mask False). Any other call opens a sequence of its own: a sub-agent, a
    retry, a compaction, or a history the harness changed. Nothing is repaired. Calls without
    sampled tokens leave no trace. A call of a kind that is not in `kinds` (a session's title, say)
    is context only, and a sequence of nothing else is left out.

    prompts [1,2]+[3], [1,2,3,4]+[5], [9]+[8]  ->  [1,2,3,4,5] and [9,8], with masks
    [0,0,1,0,1] and [0,1].
    """
    branches: list[_Branch] = []
    for call in _sampled(calls):
        matches = [branch for branch in branches if branch.leads_to(call.prompt_ids)]
        if matches:
            max(matches, key=len).extend(call, is_trained=_is_trained(call, kinds))
        else:
            branches.append(_Branch(call, is_trained=_is_trained(call, kinds)))
    samples = [branch.sample(rollout_id, group_id) for branch in branches]
    return [sample for sample in samples if sample.mask.any()]


@dataclass(frozen=True, slots=True)
class Link:
    """A call's place in the tree of its rollout."""

    call: Call
    nearest: Call | None
    """The earlier call that it shares most with."""
    num_shared: int
    """Tokens of its prompt that the nearest call's prompt and answer begin with."""
    continues: bool
    """Whether that is the whole of the nearest call: both are one sequence."""


def link(calls: Iterable[Call]) -> list[Link]:
    """The tree of a rollout, call by call in the order they were made."""
    sampled = _sampled(calls)
    links = []
    for index, call in enumerate(sampled):
        shared = [common_prefix(_sequence(other), call.prompt_ids) for other in sampled[:index]]
        best = int(np.argmax(shared)) if any(shared) else None
        nearest = None if best is None else sampled[best]
        continues = nearest is not None and _leads_to(_sequence(nearest), call.prompt_ids)
        links.append(Link(call, nearest, max(shared, default=0), continues))
    return links


def shorten(samples: Sequence[Sample], *, limit: int, how: str) -> list[Sample]:
    """The samples of one rollout, none of more than `limit` tokens.

    how: `cut` ends a longer one with the last whole turn that fits, and leaves it out when none
    does; `mask` leaves out the rollout; `fail` raises ConfigError.
    """
    long = [sample for sample in samples if len(sample.token_ids) > limit]
    if long and how == "fail":
        raise ConfigError(
            f"rollout `{long[0].rollout_id}` has a sample of {len(long[0].token_ids)} tokens; "
            f"train.max_sample_tokens is {limit}. Raise it, or set train.too_long to cut or mask.",
            rollout_id=long[0].rollout_id,
        )
    if long and how == "mask":
        return []
    cut = [_cut(sample, limit) if len(sample.token_ids) > limit else sample for sample in samples]
    return [sample for sample in cut if sample.mask.any()]


def _cut(sample: Sample, limit: int) -> Sample:
    is_last = sample.mask[:limit] & (sample.calls[:limit] != sample.calls[1 : limit + 1])
    end = max(np.flatnonzero(is_last) + 1, default=0)
    arrays = ("token_ids", "mask", "logprobs", "versions", "calls")
    return replace(sample, is_cut=True, **{name: getattr(sample, name)[:end] for name in arrays})


def discarded(calls: Iterable[Call]) -> list[Call]:
    """Calls whose answer no later prompt of their thread begins with, though there is one."""
    sampled = _sampled(calls)
    return [
        call for index, call in enumerate(sampled)
        if (later := [c for c in sampled[index + 1 :] if c.thread == call.thread])
        and not any(_leads_to(_sequence(call), c.prompt_ids) for c in later)
    ]  # fmt: skip


def _sampled(calls: Iterable[Call]) -> list[Call]:
    ordered = sorted(calls, key=lambda call: (call.started_at, call.index))
    return [call for call in ordered if len(call.sampled_ids)]


def _sequence(call: Call) -> np.ndarray:
    return np.concatenate([call.prompt_ids, call.sampled_ids])


def _leads_to(sequence: np.ndarray, prompt_ids: np.ndarray) -> bool:
    """Whether the prompt begins with the sequence; most are told apart by a few tokens."""
    n, near = len(sequence), max(len(sequence) - 16, 0)
    return (
        len(prompt_ids) >= n
        and np.array_equal(prompt_ids[near:n], sequence[near:])
        and np.array_equal(prompt_ids[:near], sequence[:near])
    )


def _is_trained(call: Call, kinds: Collection[str]) -> bool:
    return call.kind is None or call.kind in kinds


class _Branch:
    """One sequence that may still grow."""

    def __init__(self, call: Call, *, is_trained: bool) -> None:
        self._parts: list[Sequence[np.ndarray]] = []
        self._ids = np.zeros(0, np.int32)
        self.extend(call, is_trained=is_trained)

    def __len__(self) -> int:
        return len(self._ids)

    def leads_to(self, prompt_ids: np.ndarray) -> bool:
        return _leads_to(self._ids, prompt_ids)

    def extend(self, call: Call, *, is_trained: bool) -> None:
        self._parts.append(_context(call.prompt_ids[len(self._ids) :]))
        trained = np.ones(len(call.sampled_ids), bool)
        index = np.full(len(call.sampled_ids), call.index, np.int32)
        answer = call.sampled_ids, trained, call.logprobs, call.versions, index
        self._parts.append(answer if is_trained else _context(call.sampled_ids))
        self._ids = np.concatenate([call.prompt_ids, call.sampled_ids])

    def sample(self, rollout_id: str, group_id: str) -> Sample:
        token_ids, mask, logprobs, versions, calls = (
            np.concatenate(column) for column in zip(*self._parts, strict=True)
        )
        return Sample(
            rollout_id=rollout_id, group_id=group_id,
            token_ids=token_ids, mask=mask, logprobs=logprobs, versions=versions,
            calls=calls,
        )  # fmt: skip


def _context(token_ids: np.ndarray) -> Sequence[np.ndarray]:
    n, none = len(token_ids), np.full(len(token_ids), -1, np.int32)
    return token_ids, np.zeros(n, bool), np.zeros(n, np.float32), none, none
