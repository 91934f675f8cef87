"""The gate fails closed: a replica that cannot reach it admits nothing."""

from __future__ import annotations

import asyncio

import pytest

from lightning_ray.errors import EngineError
from lightning_ray.gateway import gate as gate_module
from lightning_ray.gateway.gate import Gate, GateState, Lease


async def test_a_late_replica_learns_that_the_gate_is_shut() -> None:
    gate = Gate()
    await gate.open()
    await gate.close(0.1)
    state = await gate.poll("late", epoch=0, in_flight=0)
    assert state == GateState(2, False)


async def test_close_returns_only_after_every_replica_has_stopped_admitting() -> None:
    gate = Gate()
    await gate.open()
    state = await gate.poll("a", epoch=0, in_flight=0)
    parked = asyncio.create_task(gate.poll("a", epoch=state.epoch, in_flight=3))
    closing = asyncio.create_task(gate.close(10.0))
    shut = await parked
    await asyncio.sleep(0.05)
    assert not closing.done()
    await gate.report("a", epoch=shut.epoch, in_flight=1)
    await asyncio.sleep(0.05)
    assert not closing.done()
    await gate.report("a", epoch=shut.epoch, in_flight=0)
    assert await closing == 0


async def test_a_lease_that_is_not_renewed_admits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "LEASE_S", 0.3)  # a constant of time, not behaviour
    is_reachable = True

    async def poll(epoch: int, in_flight: int) -> GateState:
        if not is_reachable:
            raise EngineError("the gate is away")
        await asyncio.sleep(0.05)
        return GateState(1, True)

    async def report(epoch: int, in_flight: int) -> None:
        pass

    lease = Lease(poll=poll, report=report)
    keeper = asyncio.create_task(lease.keep())
    async with lease.admit(1.0):
        pass
    is_reachable = False
    await asyncio.sleep(0.5)
    with pytest.raises(EngineError, match="given up"):
        async with lease.admit(0.2):
            pass
    is_reachable = True
    async with lease.admit(2.0):
        pass
    keeper.cancel()
