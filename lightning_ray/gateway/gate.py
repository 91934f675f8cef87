"""Whether calls may pass: one Gate holds the truth, each replica a short Lease that fails closed.

Closing drains: the gate is shut in every replica before `close` counts what still runs. A replica
that cannot reach the gate admits nothing once its lease is older than LEASE_S, so the gate may
forget it after that time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from lightning_ray.errors import EngineError

POLL_S = 2.0
LEASE_S = 6.0


@dataclass(frozen=True)
class GateState:
    """The truth at one moment; the epoch grows with every change."""

    epoch: int
    is_open: bool


@dataclass
class _Replica:
    seen_epoch: int
    in_flight: int
    heard_at: float


class Gate:
    """The one truth; an actor of the run."""

    def __init__(self) -> None:
        self._state = GateState(0, False)
        self._replicas: dict[str, _Replica] = {}
        self._changed = asyncio.Condition()

    async def poll(self, replica: str, *, epoch: int, in_flight: int) -> GateState:
        """The state as soon as it is newer than `epoch`, or after POLL_S; renews the lease."""
        self._replicas[replica] = _Replica(epoch, in_flight, time.monotonic())
        async with self._changed:
            self._changed.notify_all()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: self._state.epoch > epoch), POLL_S
                )
        return self._state

    async def report(self, replica: str, *, epoch: int, in_flight: int) -> None:
        """A replica has taken in `epoch` and has this many calls left."""
        self._replicas[replica] = _Replica(epoch, in_flight, time.monotonic())
        async with self._changed:
            self._changed.notify_all()

    async def close(self, drain_s: float) -> int:
        """Shut the gate and let running calls finish for `drain_s`; how many still run.

        Returns only after every replica has stopped admitting.
        """
        await self._set(False)
        await self._wait(self._is_shut, LEASE_S + POLL_S)
        await self._wait(lambda: self._is_shut() and self.num_in_flight() == 0, drain_s)
        return self.num_in_flight()

    async def open(self) -> None:
        """Let calls pass again."""
        await self._set(True)

    def num_in_flight(self) -> int:
        """Calls that are admitted and not recorded yet, over the replicas that are alive."""
        return sum(replica.in_flight for replica in self._alive())

    def _is_shut(self) -> bool:
        return all(replica.seen_epoch == self._state.epoch for replica in self._alive())

    def _alive(self) -> list[_Replica]:
        horizon = time.monotonic() - LEASE_S - POLL_S
        return [replica for replica in self._replicas.values() if replica.heard_at > horizon]

    async def _set(self, is_open: bool) -> None:
        async with self._changed:
            if self._state.is_open != is_open:
                self._state = GateState(self._state.epoch + 1, is_open)
            self._changed.notify_all()

    async def _wait(self, done: Callable[[], bool], limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        async with self._changed:
            while not done() and (left := deadline - time.monotonic()) > 0:
                try:
                    # wakes by itself too: a silent replica's lease ends without a message
                    await asyncio.wait_for(self._changed.wait(), min(left, 0.5))
                except TimeoutError:
                    continue


class Lease:
    """One replica's view of the gate; admission is decided here, without a message per call."""

    def __init__(
        self,
        *,
        poll: Callable[[int, int], Awaitable[GateState]],
        report: Callable[[int, int], Awaitable[None]],
    ) -> None:
        self._poll = poll
        self._report = report
        self._state = GateState(0, False)
        self._fresh_until = 0.0
        self._in_flight = 0
        self._opened = asyncio.Event()
        self._reports: set[asyncio.Future[None]] = set()

    async def keep(self) -> None:
        """Renew the lease until cancelled."""
        while True:
            asked_at = time.monotonic()
            try:
                state = await self._poll(self._state.epoch, self._in_flight)
            except EngineError:  # the gate's actor is away; fail closed, ask again
                await asyncio.sleep(0.5)
                continue
            self._fresh_until = asked_at + LEASE_S
            self._take(state)

    @contextlib.asynccontextmanager
    async def admit(self, hold_s: float) -> AsyncIterator[None]:
        """Wait until calls may pass, at most `hold_s`; the block counts as in flight."""
        deadline = time.monotonic() + hold_s
        while not (self._state.is_open and time.monotonic() < self._fresh_until):
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineError(
                    f"weights have been moving for more than {hold_s:.0f} s; the call was given up",
                    status=503,
                )
            try:
                await asyncio.wait_for(self._opened.wait(), min(left, POLL_S))
            except TimeoutError:
                continue
            if time.monotonic() >= self._fresh_until:  # open by an old lease: wait for a renewal
                await asyncio.sleep(0.05)
        self._in_flight += 1
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._state.is_open:
                self._tell()

    def _take(self, state: GateState) -> None:
        changed, self._state = state != self._state, state
        self._opened.set() if state.is_open else self._opened.clear()
        if changed and not state.is_open:
            self._tell()

    def _tell(self) -> None:
        task = asyncio.ensure_future(self._report(self._state.epoch, self._in_flight))
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)
