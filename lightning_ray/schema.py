"""Every record of a run, once: frozen dataclasses, and the Arrow schemas rendered from them.

Data goes one way, from Task to Batch. A record is never edited after it is handed on. Fields are
added, never renamed or retyped; a new field is nullable, and SCHEMA_VERSION goes up.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 2

Mode = Literal["train", "validate", "serve"]
OutcomeKind = Literal["ok", "agent_failed", "timeout", "context_overflow", "harness_crash", "infra"]
TokenIds = Annotated[np.ndarray, pa.list_(pa.int32())]
Logprobs = Annotated[np.ndarray, pa.list_(pa.float32())]
Versions = Annotated[np.ndarray, pa.list_(pa.int32())]
Mask = Annotated[np.ndarray, pa.list_(pa.bool_())]
Indices = Annotated[np.ndarray, pa.list_(pa.int32())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row to be solved."""

    task_id: str
    data_json: str
    """What the harness and the grader are given, as a JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One execution of a harness on one task. Not a training example: that is a Sample."""

    rollout_id: str
    group_id: str
    """The rollouts of one task in one step; credit is centred over it."""
    task: Task
    mode: Mode
    step: int
    """The training step that asked for it."""
    attempt: int
    """0, then one more each time the machinery failed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One exchange between a harness and the policy, durable before the harness sees its end."""

    call_id: str
    rollout_id: str
    attempt: int
    index: int
    """Order of recording within the attempt, from 0."""
    dialect: str
    status: int
    """HTTP status the harness saw."""
    error: str | None
    prompt_ids: TokenIds
    """[P] as the engine saw them."""
    sampled_ids: TokenIds
    """[S] as the engine sampled them; the stop token included."""
    logprobs: Logprobs
    """[S] natural log, under the distribution that was sampled from."""
    versions: Versions
    """[S] optimiser steps behind the weights that sampled each token."""
    finish_reason: str | None
    started_at: float
    duration_s: float
    request: bytes
    """The body as the harness sent it."""
    response: bytes
    """The body as the engine sent it; an event stream is kept whole."""
    exchange_id: str | None = None
    """Of the one run in the engine; several calls share it when one request samples several."""
    kind: str | None = None
    """main, subagent, compaction, title, commit-message or prewarm; from what the client says."""
    thread: str | None = None
    """The client's own name for the conversation, or empty."""
    client_json: str | None = None
    """The headers that identify the client, and what was left out of its request."""
    rendered_ids: TokenIds | None = None
    """[N] the prompt as the chat template rendered it; None when the engine saw just that."""
    joined: str | None = None
    """How the prompt relates to the rollout's earlier calls (`engine.continuation.Reason`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a rollout met that is not a call."""

    rollout_id: str
    attempt: int
    at: float
    kind: str
    data_json: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended. One per rollout, never rewritten."""

    rollout_id: str
    attempt: int
    group_id: str
    kind: OutcomeKind
    reward: float | None
    """None: not scored, so masked. 0.0: scored zero."""
    message: str
    """Empty when ok; else what happened, for a reader."""
    num_calls: int
    started_at: float
    queued_s: float
    running_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A rollout with its calls, events and outcome, put together on reading."""

    rollout: Rollout
    calls: tuple[Call, ...]
    events: tuple[Event, ...]
    outcome: Outcome | None
    """None while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One root-to-leaf token sequence to learn from."""

    rollout_id: str
    group_id: str
    token_ids: TokenIds
    """[L] int32"""
    mask: Mask
    """[L] bool, True where this sample trains a token the policy sampled."""
    logprobs: Logprobs
    """[L] float32, 0.0 where mask is False."""
    versions: Versions
    """[L] int32, -1 where mask is False."""
    calls: Indices
    """[L] int32, index of the call that sampled the token, -1 where mask is False."""
    is_cut: bool = False
    """Whether turns at its end were left out, because it was too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One micro-batch for one rank: rows of whole samples, and their N trained tokens, flat."""

    token_ids: np.ndarray
    """[B, T] int64"""
    positions: np.ndarray
    """[B, T] int64, of each token in its sample."""
    ends: np.ndarray
    """[B, T] int64, where in the row the tokens end that see this one: those of its sample and,
    where samples share it, of theirs. 0: padding."""
    previous: np.ndarray
    """[N] int64, where in the flattened rows the token before a trained one is."""
    targets: np.ndarray
    """[N] int64, the trained tokens."""
    rollouts: np.ndarray
    """[N] int64, whose they are, of the rollouts of the optimiser step."""
    logprobs: np.ndarray
    """[N] float32, as sampled."""
    fresh: np.ndarray
    """[N] bool, True where the weights about to be updated sampled the token."""
    advantages: np.ndarray
    """[N] float32"""
    weights: np.ndarray
    """[N] float32, share in the mean of the optimiser step."""
    num_rollouts: int
    """Of the optimiser step."""


Record = TypeVar("Record")


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the front that two arrays share."""
    n = min(len(left), len(right))
    different = left[:n] != right[:n]
    return int(different.argmax()) if different.any() else n


@functools.cache
def arrow_schema(record: type) -> pa.Schema:
    """The Arrow schema of a record class, its fields in order, nullable where None is allowed."""
    return pa.schema(_fields(record), metadata={"schema_version": str(SCHEMA_VERSION)})


def to_table(records: Iterable[Any], record: type) -> pa.Table:
    """One row per record; `from_table` gives the records back."""
    schema = arrow_schema(record)
    rows = list(records)
    columns = [
        pa.array([_plain(getattr(row, field.name)) for row in rows], field.type) for field in schema
    ]
    return pa.table(columns, schema=schema)


def from_table(table: pa.Table, record: type[Record]) -> list[Record]:
    """The records of a table; a column that is missing must have a default."""
    hints = get_type_hints(record, include_extras=True)
    columns = {name: _column(table[name], hints[name]) for name in table.column_names}
    return [
        record(**dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]


def _fields(record: type) -> list[pa.Field]:
    hints = get_type_hints(record, include_extras=True)
    return [_field(field.name, hints[field.name]) for field in dataclasses.fields(record)]


def _field(name: str, hint: Any) -> pa.Field:
    required = _required(hint)
    return pa.field(name, _arrow_type(required), nullable=required is not hint)


def _required(hint: Any) -> Any:
    """The hint without its None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (required,) = [arg for arg in get_args(hint) if arg is not type(None)]
    return required


def _arrow_type(hint: Any) -> pa.DataType:
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) is Literal:
        return pa.string()
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return pa.struct(_fields(hint))
    return {
        str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_(),
        bytes: pa.large_binary(),
    }[hint]  # fmt: skip


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _column(column: pa.ChunkedArray, hint: Any) -> list[Any]:
    hint = _required(hint)
    if get_origin(hint) is Annotated:
        return [
            row.values.to_numpy(zero_copy_only=False) if row.is_valid else None for row in column
        ]
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return [hint(**row) for row in column.to_pylist()]
    return column.to_pylist()
