"""The real gateway app: who may call, what is recorded, and what a caller is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

from lightning_ray import wire
from lightning_ray.errors import RecordError
from lightning_ray.gateway.app import create_app
from lightning_ray.gateway.dialects import DIALECTS
from lightning_ray.gateway.gate import Gate, Lease
from lightning_ray.gateway.keys import Claims, sign
from lightning_ray.store import Exchange
from tests.gateway.fake_engine import FakeEngine

SECRET = "run-secret"
ROUTES = [dialect.path for dialect in DIALECTS.values() if dialect.samples]


@dataclass
class World:
    client: httpx.AsyncClient
    engine: FakeEngine
    gate: Gate
    recorded: list[Exchange] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)

    async def call(self, route: str = "chat/completions", body: Any = None, **options: Any) -> Any:
        rollout, attempt = options.get("rollout", "r1"), options.get("attempt", 0)
        key = options.get("key", make_key())
        content = body if isinstance(body, bytes) else json.dumps(body or {"model": "x"})
        return await self.client.post(
            f"/rollout/{rollout}/attempt/{attempt}/v1/{route}", content=content,
            headers={"authorization": f"Bearer {key}"} | options.get("headers", {}),
        )  # fmt: skip


def make_key(
    rollout: str = "r1", attempt: int = 0, *, mode: Any = "train", left_s: float = 86400.0
) -> str:
    return sign(Claims(rollout, attempt, mode, time.time() + left_s), secret=SECRET)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with make_world() as made:
        await made.gate.open()
        yield made


@asynccontextmanager
async def make_world(hold_s: float = 5.0, num_engines: int = 1) -> AsyncIterator[World]:
    engine, gate = FakeEngine(), Gate()
    holder: list[World] = []

    async def record(exchange: Exchange) -> None:
        await asyncio.sleep(0.01)
        if exchange.rollout_id in holder[0].ended:
            raise RecordError("the attempt has ended")
        holder[0].recorded.append(exchange)

    lease = Lease(
        poll=lambda epoch, n: gate.poll("replica", epoch=epoch, in_flight=n),
        report=lambda epoch, n: gate.report("replica", epoch=epoch, in_flight=n),
    )
    async with engine.serving() as url:
        app = create_app(
            engine_urls=[url] * num_engines, secret=SECRET, served_name="policy",
            sampling={"train": wire.Sampling(temperature=1.0, max_tokens=100),
                      "validate": wire.Sampling(temperature=0.0, max_tokens=100),
                      "serve": wire.Sampling()},
            lease=lease, record=record, hold_s=hold_s,
        )  # fmt: skip
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://gateway") as client,
        ):
            holder.append(World(client, engine, gate))
            yield holder[0]


@pytest.mark.parametrize("route", ROUTES)
async def test_a_call_is_forwarded_recorded_and_answered(world: World, route: str) -> None:
    reply = await world.call(route, {"model": "gpt-9", "max_tokens": 7, "max_output_tokens": 7})
    assert (reply.status_code, reply.content) == (200, b'{"ok":true}')
    (exchange,) = world.recorded
    assert (exchange.rollout_id, exchange.attempt, exchange.status) == ("r1", 0, 200)
    assert exchange.response == b'{"ok":true}'
    assert len(wire.decode_captures(exchange.captures)) == 1
    path, headers, body = world.engine.requests[0]
    assert path == f"/v1/{route}"
    assert json.loads(body)["model"] == "policy"
    sampling = msgspec.json.decode(headers[wire.SAMPLING_HEADER], type=wire.Sampling)
    assert sampling == wire.Sampling(temperature=1.0, max_tokens=7)


async def test_a_call_is_durable_before_the_harness_sees_the_end_of_its_reply() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.ended.add("r1")  # the record fails, so no reply may be seen
        reply = await world.call()
        assert reply.status_code == 409
        assert "ended" in reply.json()["error"]["message"]
        assert world.recorded == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("key", "status", "words"),
    [
        ("", 401, "a key is needed"),
        ("sk-lr-!!", 401, "not one of this gateway's"),
        ("sk-lr-AAAA", 401, "not one of this gateway's"),
        (make_key()[:-2] + "xx", 401, "not one of this gateway's"),
        (sign(Claims("r1", 0, "train", 9e12), secret="other"), 401, "not one of this gateway's"),
        (make_key(left_s=-1), 401, "expired"),
        (make_key("r2"), 404, "no rollout `r1`"),
        (make_key(attempt=1), 404, "no rollout `r1`, attempt 0"),
    ],
)
async def test_a_key_opens_its_own_attempt_and_nothing_else(
    world: World, route: str, key: str, status: int, words: str
) -> None:
    reply = await world.call(route, key=key)
    assert reply.status_code == status
    error = reply.json()["error"]
    assert words in error["message"]
    assert (reply.json().get("type") == "error") == (route == "messages")
    assert world.engine.requests == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"1", b"\xff\xfe", b'{"max_tokens": "many", "max_output_tokens": -1}'],
)
async def test_a_body_that_is_no_request_is_told_so(world: World, route: str, body: bytes) -> None:
    reply = await world.call(route, body)
    assert reply.status_code == 400
    assert "must be" in reply.json()["error"]["message"]
    assert world.engine.requests == []


async def test_an_unknown_route_names_the_known_ones(world: World) -> None:
    reply = await world.call("embeddings")
    assert reply.status_code == 404
    assert "/v1/chat/completions" in reply.json()["error"]["message"]


async def test_the_base_url_works_with_and_without_v1_and_answers_probes(world: World) -> None:
    base = "/rollout/r1/attempt/0"
    headers = {"x-api-key": make_key()}
    assert (await world.client.head(base)).status_code == 200
    assert (await world.client.get(f"{base}/api/hello", headers=headers)).status_code == 200
    reply = await world.client.post(f"{base}/messages?beta=true", json={}, headers=headers)
    assert reply.status_code == 200


async def test_an_engine_error_keeps_its_status_and_is_recorded(world: World) -> None:
    problem = b'{"error":{"message":"too long"}}'
    world.engine.handler = lambda request, body: (400, {}, [problem], [])
    reply = await world.call()
    assert (reply.status_code, reply.content) == (400, problem)
    assert world.recorded[0].status == 400


async def test_a_reply_without_a_capture_is_an_error_not_a_guess(world: World) -> None:
    world.engine.handler = lambda request, body: (200, {}, [b"{}"], [])
    reply = await world.call()
    assert reply.status_code == 500
    assert "without a capture" in reply.json()["error"]["message"]


async def test_a_cut_reply_is_asked_for_again(world: World) -> None:
    world.engine.cut_replies = 1
    assert (await world.call()).status_code == 200
    assert len(world.engine.requests) == 2
    assert len(world.recorded) == 1


async def test_an_engine_that_is_gone_is_a_503_that_names_it() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.engine.cut_replies = 99
        reply = await world.call("messages")
        assert reply.status_code == 503
        assert "engine/0 did not answer" in reply.json()["error"]["message"]
        assert world.recorded[0].status == 503


async def test_closing_the_gate_waits_for_running_calls_and_holds_new_ones(world: World) -> None:
    world.engine.delay_s = 0.3
    running = asyncio.create_task(world.call())
    await asyncio.sleep(0.1)
    assert await world.gate.close(5.0) == 0
    assert running.done() or len(world.recorded) == 1
    held = asyncio.create_task(world.call())
    await asyncio.sleep(0.3)
    assert len(world.engine.requests) == 1
    await world.gate.open()
    assert (await held).status_code == 200
    assert (await running).status_code == 200


async def test_a_drain_that_takes_too_long_says_how_many_calls_are_left(world: World) -> None:
    world.engine.delay_s = 1.0
    running = asyncio.create_task(world.call())
    await asyncio.sleep(0.1)
    assert await world.gate.close(0.2) == 1
    assert (await running).status_code == 200


async def test_a_call_held_too_long_is_told_so() -> None:
    async with make_world(hold_s=0.3) as world:
        reply = await world.call()
        assert reply.status_code == 503
        assert "weights have been moving" in reply.json()["error"]["message"]
