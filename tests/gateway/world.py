"""The real gateway app on real HTTP, before a fake engine and a list in place of the store."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from lightning_ray import wire
from lightning_ray.errors import RecordError
from lightning_ray.gateway.app import Ties, create_app
from lightning_ray.gateway.dialects import DIALECTS
from lightning_ray.gateway.gate import Gate, Lease
from lightning_ray.gateway.keys import Claims, sign
from lightning_ray.store import Exchange
from tests.gateway.fake_engine import FakeEngine, serving

SECRET = "run-secret"
ROUTES = [dialect.path for dialect in DIALECTS.values() if dialect.samples]


@dataclass
class World:
    client: httpx.AsyncClient
    engine: FakeEngine
    gate: Gate
    recorded: list[Exchange] = field(default_factory=list)
    """Once by exchange, as the store keeps them."""
    num_records: int = 0
    record_s: float = 0.01
    ended: set[str] = field(default_factory=set)

    async def call(self, route: str = "chat/completions", body: Any = None, **options: Any) -> Any:
        return await self.client.post(
            url(route, **options), content=content(body), headers=headers(**options)
        )

    async def record(self, exchange: Exchange) -> None:
        await asyncio.sleep(self.record_s)
        self.num_records += 1
        if exchange.rollout_id in self.ended:
            raise RecordError("the attempt has ended")
        if exchange.exchange_id not in [known.exchange_id for known in self.recorded]:
            self.recorded.append(exchange)

    async def earlier(self, rollout_id: str, attempt: int) -> list[tuple[bytes, bytes]]:
        return [(known.request, known.response) for known in self.recorded]


def url(route: str, **options: Any) -> str:
    rollout, attempt = options.get("rollout", "r1"), options.get("attempt", 0)
    return f"/rollout/{rollout}/attempt/{attempt}/v1/{route}"


def content(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body or {"model": "x"}).encode()


def headers(**options: Any) -> dict[str, str]:
    key = options.get("key", make_key())
    return ({"authorization": f"Bearer {key}"} if key else {}) | options.get("headers", {})


def make_key(
    rollout: str = "r1", attempt: int = 0, *, mode: Any = "train", left_s: float = 86400.0
) -> str:
    return sign(Claims(rollout, attempt, mode, time.time() + left_s), secret=SECRET)


@asynccontextmanager
async def make_world(
    *, num_engines: int = 1, num_dead: int = 0, **ties: Any
) -> AsyncIterator[World]:
    """ties: settings of `Ties` that differ from the defaults here."""
    engine, gate = FakeEngine(), Gate()
    world = World(httpx.AsyncClient(timeout=30), engine, gate)
    lease = Lease(
        poll=lambda epoch, n: gate.poll("replica", epoch=epoch, in_flight=n),
        report=lambda epoch, n: gate.report("replica", epoch=epoch, in_flight=n),
    )
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine)) for _ in range(num_engines)]
        urls += [f"http://127.0.0.1:{9 + index}" for index in range(num_dead)]
        urls += ties.pop("more_urls", [])
        settings: dict[str, Any] = {
            "engine_urls": urls, "secret": SECRET, "served_name": "policy",
            "sampling": {"train": wire.Sampling(temperature=1.0, max_tokens=100),
                         "validate": wire.Sampling(temperature=0.0, max_tokens=100),
                         "serve": wire.Sampling()},
            "record": world.record, "earlier": world.earlier, "hold_s": 5.0, "engine_s": 1.0,
        }  # fmt: skip
        app = create_app(lease, Ties(**settings | ties))
        world.client.base_url = httpx.URL(await stack.enter_async_context(serving(app)))
        async with world.client:
            yield world
