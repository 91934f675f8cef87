"""The real gateway app: who may call, what is recorded, and what a caller is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest

from lightning_ray import wire
from lightning_ray.gateway.keys import Claims, sign
from tests.gateway.world import ROUTES, World, make_key, make_world, url


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with make_world() as made:
        await made.gate.open()
        yield made


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


async def test_r1_the_base_url_works_with_and_without_v1_and_answers_probes(world: World) -> None:
    base = "/rollout/r1/attempt/0"
    headers = {"x-api-key": make_key()}
    assert (await world.client.head(base)).status_code == 200
    assert (await world.client.get(f"{base}/api/hello", headers=headers)).status_code == 200
    reply = await world.client.post(f"{base}/messages?beta=true", json={}, headers=headers)
    assert reply.status_code == 200


async def test_an_engine_error_keeps_its_status_and_is_recorded(world: World) -> None:
    problem = b'{"error":{"message":"too long"}}'
    world.engine.handler = lambda path, body: (400, {}, [problem], [])
    reply = await world.call()
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "too long")
    assert world.recorded[0].status == 400


async def test_a_reply_without_a_capture_is_an_error_not_a_guess(world: World) -> None:
    world.engine.handler = lambda path, body: (200, {}, [b"{}"], [])
    reply = await world.call()
    assert reply.status_code == 500
    assert "without a capture" in reply.json()["error"]["message"]


async def test_a_cut_reply_is_asked_for_again(world: World) -> None:
    world.engine.cut_replies = 1
    assert (await world.call()).status_code == 200
    assert len(world.engine.requests) == 1  # the second time it joined the first
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


async def test_r21_a_websocket_is_refused_with_426(world: World) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await session.ws_connect(f"{str(world.client.base_url).rstrip('/')}{url('responses')}")
    assert refused.value.status == 426
    reply = await world.client.get(
        "/rollout/r1/attempt/0/v1/responses", headers={"upgrade": "websocket"}
    )
    assert reply.status_code == 426
