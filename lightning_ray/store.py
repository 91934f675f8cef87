"""Keeps every record of a run durably as Arrow, and reads trajectories back.

One writer owns the folder. A record is acknowledged after fsync; records that arrive meanwhile
share the next one (group commit). Each table is an Arrow IPC stream, `<table>.arrows`, sealed into
Parquet segments, `<table>-000001.parquet`. A torn tail is dropped when the folder is opened again.

A call is stored as what it adds to its parent: the call of the same attempt that its prompt or body
shares most with. So a rollout costs its unique tokens, not their square.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lightning_ray import wire
from lightning_ray.errors import RecordError
from lightning_ray.schema import (
    Call,
    Event,
    Outcome,
    Rollout,
    Trajectory,
    arrow_schema,
    common_prefix,
    from_table,
    to_table,
)

SEGMENT_BYTES = 64 << 20


@dataclass(frozen=True)
class Exchange:
    """What the gateway knows of one call; the captures stay as the engine packed them."""

    exchange_id: str
    """Of the one run in the engine: recorded once, however often it is delivered."""
    rollout_id: str
    attempt: int
    dialect: str
    kind: str
    thread: str
    client_json: str
    status: int
    started_at: float
    duration_s: float
    request: bytes
    response: bytes
    captures: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCall(Call):
    """A call on disk: `prompt_ids` and `request` hold only what the parent has not."""

    parent_call_id: str | None
    prompt_shared: int
    """Tokens taken from the front of the parent's prompt and sampled ids."""
    request_head: int
    """Bytes taken from the front of the parent's body,"""
    request_tail: int
    """and from its end."""
    rendered_shared: int | None = None
    """Tokens taken from the front of the parent's rendered prompt."""


TABLES: dict[str, type] = {
    "rollouts": Rollout,
    "calls": StoredCall,
    "events": Event,
    "outcomes": Outcome,
}


@dataclass
class _Attempt:
    """What memory holds of a running attempt."""

    calls: list[Call] = field(default_factory=list)
    """Durable ones."""
    num_calls: int = 0
    exchanges: dict[str, asyncio.Future[None]] = field(default_factory=dict)


class Store:
    """The one writer of a run's folder; an actor."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._logs = {name: _Log(self.folder, name, record) for name, record in TABLES.items()}
        self._ended = {outcome.rollout_id for outcome in _read(self.folder, "outcomes", Outcome)}
        self._open: dict[tuple[str, int], _Attempt] = {}
        self._rollouts: dict[str, Rollout] = {}
        self._pending: list[tuple[str, Any, asyncio.Future[None]]] = []
        self._committing: asyncio.Task[None] | None = None

    async def begin(self, rollout: Rollout) -> None:
        """An attempt starts; the calls of an earlier one are kept and no longer taken."""
        for attempt in range(rollout.attempt):
            self._open.pop((rollout.rollout_id, attempt), None)
        self._open[rollout.rollout_id, rollout.attempt] = _Attempt()
        self._rollouts[rollout.rollout_id] = rollout
        await self._write("rollouts", [rollout])

    async def append(self, exchange: Exchange) -> None:
        """Return when the exchange is durable, which it becomes once, however often it is given;
        RecordError when its attempt is not running."""
        attempt = self._open.get((exchange.rollout_id, exchange.attempt))
        if attempt is None or exchange.rollout_id in self._ended:
            raise RecordError(
                f"rollout `{exchange.rollout_id}` attempt {exchange.attempt} has ended; "
                "its calls are no longer taken",
                rollout_id=exchange.rollout_id,
            )
        writing = attempt.exchanges.get(exchange.exchange_id)
        if writing is None or (writing.done() and writing.exception() is not None):
            writing = asyncio.ensure_future(self._append(exchange, attempt))
            attempt.exchanges[exchange.exchange_id] = writing
        await asyncio.shield(writing)

    async def append_all(self, exchanges: list[Exchange]) -> list[BaseException | None]:
        """`append` each; by exchange, what went wrong."""
        return await asyncio.gather(*map(self.append, exchanges), return_exceptions=True)

    async def _append(self, exchange: Exchange, attempt: _Attempt) -> None:
        fresh = _calls(exchange, first_index=attempt.num_calls)
        attempt.num_calls += len(fresh)
        # only a durable call may be a parent, or a child could outlive it
        await self._write("calls", [_shorten(call, attempt.calls) for call in fresh])
        attempt.calls += fresh

    async def note(self, event: Event) -> None:
        """Return when the event is durable."""
        await self._write("events", [event])

    async def finish(self, outcome: Outcome) -> None:
        """Return when the outcome is durable; RecordError when the rollout has one already."""
        if outcome.rollout_id in self._ended:
            raise RecordError(
                f"rollout `{outcome.rollout_id}` already has an outcome; it never changes",
                rollout_id=outcome.rollout_id,
            )
        self._ended.add(outcome.rollout_id)
        try:
            await self._write("outcomes", [outcome])
        except RecordError:
            self._ended.discard(outcome.rollout_id)
            raise

    async def calls(self, rollout_id: str, attempt: int, *, bodies: bool = False) -> list[Call]:
        """The calls of a running or just ended attempt; without bodies they travel lighter."""
        found = self._open.get((rollout_id, attempt), _Attempt()).calls
        return found if bodies else [replace(call, request=b"", response=b"") for call in found]

    async def bodies(self, rollout_id: str, attempt: int) -> list[tuple[bytes, bytes]]:
        """The request and response bodies of a running attempt."""
        calls = await self.calls(rollout_id, attempt, bodies=True)
        return [(call.request, call.response) for call in calls]

    async def release(self, rollout_ids: Iterable[str]) -> None:
        """Forget what memory holds of these rollouts; the disk keeps it."""
        for rollout_id in rollout_ids:
            rollout = self._rollouts.pop(rollout_id, None)
            if rollout is not None:
                self._open.pop((rollout_id, rollout.attempt), None)

    async def close(self) -> None:
        """Commit what waits and seal every table."""
        if self._committing is not None:
            await self._committing
        for log in self._logs.values():
            await asyncio.to_thread(log.seal)

    async def _write(self, table: str, records: list[Any]) -> None:
        loop = asyncio.get_running_loop()
        futures = []
        for record in records:
            futures.append(loop.create_future())
            self._pending.append((table, record, futures[-1]))
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit())
        for outcome in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _commit(self) -> None:
        """Write and fsync what waits, until nothing waits."""
        while self._pending:
            batch, self._pending = self._pending, []
            rows = defaultdict(list)
            for table, record, _ in batch:
                rows[table].append(record)
            failure: RecordError | None = None
            try:
                await asyncio.to_thread(self._append_all, rows)
            except OSError as error:
                failure = RecordError(
                    f"the store could not write to `{self.folder}`: {error.strerror}. "
                    "Nothing acknowledged is lost; free space and run again."
                )
            for _, _, future in batch:
                if not future.cancelled():
                    future.set_exception(failure) if failure else future.set_result(None)

    def _append_all(self, rows: dict[str, list[Any]]) -> None:
        for table, records in rows.items():
            self._logs[table].append(records)


class _Log:
    """One table's open stream; every append is on disk when it returns."""

    def __init__(self, folder: Path, name: str, record: type) -> None:
        self.folder, self.name, self.record = folder, name, record
        self.schema = arrow_schema(record)
        self.path = folder / f"{name}.arrows"
        if self.path.exists():
            self.seal()
        else:
            self._create()

    def append(self, records: list[Any]) -> None:
        """Append and fsync; a write that fails leaves the stream as it was."""
        table = to_table(records, self.record).combine_chunks()
        payload = b"".join(bytes(batch.serialize()) for batch in table.to_batches())
        try:
            self._write(payload)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        if self._size > SEGMENT_BYTES:
            self.seal()

    def seal(self) -> None:
        """Turn the stream into the next Parquet segment and begin a new one."""
        rows = _read_stream(self.path, self.schema)
        if rows.num_rows:
            number = len(list(self.folder.glob(f"{self.name}-*.parquet"))) + 1
            target = self.folder / f"{self.name}-{number:06d}.parquet"
            partial = target.with_suffix(".tmp")
            pq.write_table(rows, partial, compression="zstd")
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.rename(target)
        self._create()

    def _create(self) -> None:
        partial = self.path.with_suffix(".new")
        self._file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._size = 0
        self._write(bytes(self.schema.serialize()))
        os.rename(partial, self.path)
        folder = os.open(self.folder, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def _write(self, payload: bytes) -> None:
        done = 0
        while done < len(payload):
            done += os.pwrite(self._file, memoryview(payload)[done:], self._size + done)
        os.fsync(self._file)
        self._size += done


def read_trajectories(folder: Path, only: Collection[str] | None = None) -> list[Trajectory]:
    """Every rollout in the folder, or those named, each its last attempt, in the order they began.

    Reads beside a writer that is still running, and up to a torn tail.
    """
    calls: dict[tuple[str, int], list[Call]] = defaultdict(list)
    for stored in _read(folder, "calls", StoredCall, only):
        siblings = calls[stored.rollout_id, stored.attempt]
        siblings.append(_restore(stored, siblings))
    events = defaultdict(list)
    for event in _read(folder, "events", Event, only):
        events[event.rollout_id].append(event)
    ends = _read(folder, "outcomes", Outcome, only)
    outcomes = {outcome.rollout_id: outcome for outcome in ends}
    last = {rollout.rollout_id: rollout for rollout in _read(folder, "rollouts", Rollout, only)}
    return [
        Trajectory(
            rollout=rollout,
            calls=tuple(sorted(calls[rollout.rollout_id, rollout.attempt], key=lambda c: c.index)),
            events=tuple(events[rollout.rollout_id]),
            outcome=outcomes.get(rollout.rollout_id),
        )
        for rollout in last.values()
    ]


def read_rollout_ids(folder: Path) -> list[str]:
    """Of every rollout in the folder, in the order they began."""
    return list(dict.fromkeys(rollout.rollout_id for rollout in _read(folder, "rollouts", Rollout)))


def _read(folder: Path, name: str, record: type, only: Collection[str] | None = None) -> list[Any]:
    """Records of a table, of all rollouts or those named: sealed segments in order, then the open
    stream."""
    tables = [pq.read_table(segment) for segment in sorted(folder.glob(f"{name}-*.parquet"))]
    stream = folder / f"{name}.arrows"
    if stream.exists():
        tables.append(_read_stream(stream, arrow_schema(record)))
    if only is not None:
        names = pa.array(list(only), pa.string())
        tables = [t.filter(pc.is_in(t["rollout_id"], value_set=names)) for t in tables]
    rows: list[Any] = []
    for table in tables:
        rows += from_table(table, record)
    return rows


def _read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    """The whole batches at the front of a stream."""
    batches = []
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as reader:
            for batch in reader:
                batches.append(batch)
    except (pa.ArrowInvalid, EOFError, OSError):
        pass  # a torn tail: the writer died in the middle of a record it had not acknowledged
    return pa.Table.from_batches(batches, schema)


def _calls(exchange: Exchange, *, first_index: int) -> list[Call]:
    """One call for each pass through `generate`; one without tokens when there was none."""
    captures: list[wire.Capture | None] = [*wire.decode_captures(exchange.captures)] or [None]
    return [
        Call(
            call_id=f"{exchange.rollout_id}/{exchange.attempt}/{index}",
            rollout_id=exchange.rollout_id,
            attempt=exchange.attempt,
            index=index,
            dialect=exchange.dialect,
            status=exchange.status,
            error=None if exchange.status < 400 else exchange.response.decode(errors="replace"),
            prompt_ids=wire.ids(capture.prompt_ids if capture else b""),
            sampled_ids=wire.ids(capture.sampled_ids if capture else b""),
            logprobs=wire.floats(capture.logprobs if capture else b""),
            versions=wire.ids(capture.versions if capture else b""),
            finish_reason=capture.finish_reason if capture else None,
            started_at=exchange.started_at,
            duration_s=exchange.duration_s,
            request=exchange.request,
            response=exchange.response,
            exchange_id=exchange.exchange_id,
            kind=exchange.kind,
            thread=exchange.thread,
            client_json=exchange.client_json,
            rendered_ids=wire.ids(capture.rendered_ids)
            if capture and capture.rendered_ids
            else None,
            joined=capture.joined if capture else None,
        )
        for index, capture in enumerate(captures, first_index)
    ]


def _shorten(call: Call, earlier: list[Call]) -> StoredCall:
    """The call without what the best of the last few calls has already."""
    fields = {name: getattr(call, name) for name in Call.__dataclass_fields__}
    if not earlier:
        return StoredCall(
            **fields, parent_call_id=None, prompt_shared=0, request_head=0, request_tail=0
        )
    parent, shared = _parent(call, earlier[-8:])
    body, other = _bytes(call.request), _bytes(parent.request)
    head = common_prefix(other, body)
    tail = common_prefix(other[head:][::-1], body[head:][::-1])
    fields["prompt_ids"] = call.prompt_ids[shared:]
    fields["request"] = call.request[head : len(call.request) - tail]
    rendered_shared = None
    if call.rendered_ids is not None:
        rendered_shared = common_prefix(_rendered(parent), call.rendered_ids)
        fields["rendered_ids"] = call.rendered_ids[rendered_shared:]
    return StoredCall(
        **fields,
        rendered_shared=rendered_shared,
        parent_call_id=parent.call_id,
        prompt_shared=shared,
        request_head=head,
        request_tail=tail,
    )


def _parent(call: Call, candidates: list[Call]) -> tuple[Call, int]:
    """The candidate that shares most of the prompt, and how many tokens that is."""
    best, most = candidates[-1], 0
    for parent in reversed(candidates):
        shared = _shared(parent, call.prompt_ids)
        if shared > most:
            best, most = parent, shared
        if shared and shared in (len(call.prompt_ids), _length(parent)):
            break  # the call goes on where this one ended, or samples the same prompt again
    return best, most


def _restore(stored: StoredCall, earlier: list[Call]) -> Call:
    """The whole call again."""
    fields = {name: getattr(stored, name) for name in Call.__dataclass_fields__}
    if stored.parent_call_id is not None:
        (parent,) = [call for call in earlier if call.call_id == stored.parent_call_id]
        shared = _sequence(parent)[: stored.prompt_shared]
        fields["prompt_ids"] = np.concatenate([shared, stored.prompt_ids])
        tail = parent.request[len(parent.request) - stored.request_tail :]
        fields["request"] = parent.request[: stored.request_head] + stored.request + tail
        if stored.rendered_shared is not None:
            front = _rendered(parent)[: stored.rendered_shared]
            fields["rendered_ids"] = np.concatenate([front, stored.rendered_ids])
    return Call(**fields)


def _rendered(call: Call) -> np.ndarray:
    return call.prompt_ids if call.rendered_ids is None else call.rendered_ids


def _shared(parent: Call, prompt_ids: np.ndarray) -> int:
    """Tokens at the front of a prompt that are the parent's prompt, and then its answer."""
    shared = common_prefix(parent.prompt_ids, prompt_ids)
    if shared == len(parent.prompt_ids):
        shared += common_prefix(parent.sampled_ids, prompt_ids[shared:])
    return shared


def _length(call: Call) -> int:
    return len(call.prompt_ids) + len(call.sampled_ids)


def _sequence(call: Call) -> np.ndarray:
    return np.concatenate([call.prompt_ids, call.sampled_ids])


def _bytes(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, np.uint8)
