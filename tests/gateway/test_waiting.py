"""A harness that waits, leaves, or asks again: nothing is lost, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import anthropic
import openai
import pytest

from tests.gateway.fake_engine import FakeEngine, capture, serving, stream_of
from tests.gateway.world import World, content, headers, make_key, make_world, url

IMPATIENT: dict[str, Any] = {"headers_s": 0.1, "keep_alive_s": 0.06}

CHAT = {
    "chat/completions": [
        'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"policy",'
        '"choices":[{"index":0,"delta":{"role":"assistant","content":"hé"},"finish_reason":null}]}',
        'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"policy",'
        '"choices":[{"index":0,"delta":{"content":"y"},"finish_reason":"stop"}]}',
        "data: [DONE]",
    ],
    "completions": [
        'data: {"id":"c1","object":"text_completion","created":1,"model":"policy",'
        '"choices":[{"index":0,"text":"héy","finish_reason":null}]}',
        'data: {"id":"c1","object":"text_completion","created":1,"model":"policy",'
        '"choices":[{"index":0,"text":"","finish_reason":"stop"}]}',
        "data: [DONE]",
    ],
    "messages": [
        'event: message_start\ndata: {"type":"message_start","message":{"id":"m","type":"message",'
        '"role":"assistant","content":[],"model":"policy","stop_reason":null,"stop_sequence":null,'
        '"usage":{"input_tokens":1,"output_tokens":0}}}',
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"héy"}}',
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}',
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
        '"stop_sequence":null},"usage":{"output_tokens":1}}',
        'event: message_stop\ndata: {"type":"message_stop"}',
    ],
    "responses": [
        f"event: response.{kind}\n"
        f'data: {{"type":"response.{kind}","sequence_number":{number},{rest}}}'
        for number, (kind, rest) in enumerate(
            [
                ("created", '"response":{"id":"resp_1","object":"response","output":[]}'),
                ("in_progress", '"response":{"id":"resp_1","object":"response","output":[]}'),
                ("output_item.added", '"output_index":0,"item":{"type":"message","id":"i",'
                 '"role":"assistant","status":"in_progress","content":[]}'),
                ("content_part.added", '"item_id":"i","output_index":0,"content_index":0,'
                 '"part":{"type":"output_text","text":"","annotations":[]}'),
                ("output_text.delta", '"item_id":"i","output_index":0,"content_index":0,'
                 '"delta":"héy","logprobs":[]'),
                ("completed", '"response":{"id":"resp_1","object":"response","created_at":1,'
                 '"model":"policy","status":"completed","tools":[],"tool_choice":"auto",'
                 '"parallel_tool_calls":true,"output":[{"type":"message","id":"i",'
                 '"role":"assistant","status":"completed","content":[{"type":"output_text",'
                 '"text":"héy","annotations":[]}]}],"usage":null}'),
            ]
        )
    ],
}  # fmt: skip
WHOLE = {
    "chat/completions": b'{"id":"c1","object":"chat.completion","created":1,"model":"policy",'
    b'"choices":[{"index":0,"message":{"role":"assistant","content":"h\xc3\xa9y"},'
    b'"finish_reason":"stop"}]}',
    "messages": b'{"id":"m","type":"message","role":"assistant","model":"policy","content":'
    b'[{"type":"text","text":"h\xc3\xa9y"}],"stop_reason":"end_turn","stop_sequence":null,'
    b'"usage":{"input_tokens":1,"output_tokens":1}}',
}


class Clients:
    """The official SDKs, pointed at a world."""

    def __init__(self, world: World, **options: Any) -> None:
        base = f"{world.client.base_url}".rstrip("/") + "/rollout/r1/attempt/0"
        options = {"api_key": make_key(), "max_retries": 0} | options
        self.openai = openai.AsyncOpenAI(base_url=f"{base}/v1", **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=base, **options)

    async def text(self, route: str, *, streamed: bool) -> str:
        ask = getattr(self, f"_{route.partition('/')[0]}{'_streamed' if streamed else ''}")
        async with self.openai, self.anthropic:
            return await ask()

    async def _chat(self) -> str:
        reply = await self.openai.chat.completions.create(model="x", messages=[])
        return reply.choices[0].message.content or ""

    async def _chat_streamed(self) -> str:
        stream = await self.openai.chat.completions.create(model="x", messages=[], stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def _completions_streamed(self) -> str:
        stream = await self.openai.completions.create(model="x", prompt="?", stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def _responses_streamed(self) -> str:
        async with self.openai.responses.stream(model="x", input="?") as stream:
            ids = {event.response.id async for event in stream if hasattr(event, "response")}
            assert len(ids) == 1
            return (await stream.get_final_response()).output_text

    async def _messages(self) -> str:
        reply = await self.anthropic.messages.create(model="x", messages=[], max_tokens=9)
        return reply.content[0].text  # type: ignore[union-attr]

    async def _messages_streamed(self) -> str:
        async with self.anthropic.messages.stream(model="x", messages=[], max_tokens=9) as stream:
            return (await stream.get_final_message()).content[0].text  # type: ignore[union-attr]


FORMS = [(route, True) for route in CHAT] + [(route, False) for route in WHOLE]


def play(world: World, route: str, *, streamed: bool) -> None:
    if streamed:
        world.engine.handler = stream_of(*CHAT[route])
    else:
        reply = {"content-type": "application/json"}, [WHOLE[route]], [capture([1], [2])]
        world.engine.handler = lambda path, body: (200, *reply)


@pytest.mark.parametrize(("route", "streamed"), FORMS)
@pytest.mark.parametrize(
    ("reply", "held"),
    [("recorded", "at the gate"), ("recorded", "not at all"), ("live", "in the engine")],
)
async def test_r3_r4_a_held_call_is_one_clean_reply_to_the_official_sdk(
    route: str, streamed: bool, reply: str, held: str
) -> None:
    async with make_world(reply=reply, **IMPATIENT) as world:
        play(world, route, streamed=streamed)
        world.engine.delay_s = 0.3 if held == "in the engine" else 0.0
        if held != "at the gate":
            await world.gate.open()
        asking = asyncio.create_task(Clients(world).text(route, streamed=streamed))
        await asyncio.sleep(0.3 if held == "at the gate" else 0.0)
        await world.gate.open()
        assert await asking == "héy"
        assert len(world.engine.requests) == len(world.recorded) == 1


@pytest.mark.parametrize(("route", "streamed"), FORMS)
async def test_r4_keep_alives_are_events_of_the_dialect_and_come_before_any_content(
    route: str, streamed: bool
) -> None:
    async with make_world(**IMPATIENT) as world:
        play(world, route, streamed=streamed)
        asking = asyncio.create_task(world.call(route, {"stream": streamed}))
        await asyncio.sleep(0.5)
        await world.gate.open()
        body = (await asking).content
    whole = "\n\n".join(CHAT[route]).encode() if streamed else WHOLE[route]
    start = body.index(whole[:30] if route != "responses" else b"event: response.output_item")
    waiting = body[:start]
    assert b"\n:" not in waiting  # no SSE comment: Codex, OpenClaw and Qwen Code do not count it
    if not streamed:
        assert set(waiting) == set(b" ")
        assert len(waiting) >= 3
        return
    events = [event for event in waiting.split(b"\n\n") if event]
    assert len(events) >= 3
    kinds = [event.split(b"\n")[0] for event in events]
    if route == "messages":
        assert set(kinds) == {b"event: ping"}
    elif route == "responses":
        assert kinds[0] == b"event: response.created"
        assert set(kinds[1:]) == {b"event: response.in_progress"}
        data = [json.loads(e.split(b"data: ")[1]) for e in body.split(b"\n\n") if b"data: " in e]
        assert [event["sequence_number"] for event in data] == sorted(
            {event["sequence_number"] for event in data}
        )
    else:
        choices = [json.loads(event.removeprefix(b"data: "))["choices"][0] for event in events]
        assert all(choice.get("delta", choice.get("text")) in ({}, "") for choice in choices)


@pytest.mark.parametrize("route", CHAT)
async def test_r5_an_engine_that_stays_away_is_told_in_the_stream_and_before_any_content(
    route: str,
) -> None:
    async with make_world(num_engines=0, num_dead=1, **IMPATIENT) as world:
        await world.gate.open()
        reply = await world.call(route, {"stream": True})
        assert reply.status_code == 200
        last = [event for event in reply.text.split("\n\n") if event][-1]
        assert "did not answer" in last
        assert ("event: error" in last) == (route == "messages")
        assert ("event: response.failed" in last) == (route == "responses")
        assert world.recorded[0].status == 503


async def test_r5_an_engine_that_fails_is_asked_again_while_the_harness_hears_keep_alives() -> None:
    async with make_world(engine_s=5.0, **IMPATIENT) as world:
        await world.gate.open()
        play(world, "messages", streamed=True)
        good, num_failures = world.engine.handler, 3

        def failing(path: str, body: bytes) -> Any:
            nonlocal num_failures
            num_failures -= 1
            return (500, {}, [b'{"error":"no"}'], []) if num_failures >= 0 else good(path, body)

        world.engine.handler = failing
        assert await Clients(world).text("messages", streamed=True) == "héy"
        assert len(world.engine.requests) == 4
        assert [known.status for known in world.recorded] == [200]


async def test_r5_an_engine_that_is_gone_is_passed_over_for_another() -> None:
    async with make_world(num_engines=1, num_dead=2) as world:
        await world.gate.open()
        replies = [await world.call(rollout=f"r{n}", key=make_key(f"r{n}")) for n in range(6)]
        assert [reply.status_code for reply in replies] == [200] * 6


async def test_r6_a_request_sent_again_while_the_first_runs_is_sampled_and_recorded_once() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.engine.delay_s = 0.3
        replies = await asyncio.gather(*[world.call() for _ in range(5)])
        assert {reply.content for reply in replies} == {b'{"ok":true}'}
        assert len(world.engine.requests) == len(world.recorded) == 1


async def test_r6_the_same_request_after_a_delivered_answer_is_a_new_sample() -> None:
    async with make_world() as world:
        await world.gate.open()
        for _ in range(3):
            assert (await world.call()).status_code == 200
        assert len(world.engine.requests) == len(world.recorded) == 3


async def test_r6_requests_that_differ_in_thread_or_attempt_are_not_the_same() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.engine.delay_s = 0.2
        await asyncio.gather(
            world.call(),
            world.call(headers={"x-claude-code-agent-id": "a"}),
            world.call(headers={"thread-id": "b"}),
            world.call(attempt=1, key=make_key(attempt=1)),
        )
        assert len(world.engine.requests) == 4


async def leave(world: World, after_s: float, body: Any = None) -> None:
    """Ask, and close the connection without waiting for the answer."""
    address = urlsplit(str(world.client.base_url))
    _, writer = await asyncio.open_connection(address.hostname, address.port)
    payload = content(body)
    lines = [
        f"POST {url('chat/completions')} HTTP/1.1",
        "host: x",
        f"content-length: {len(payload)}",
    ]
    lines += [f"{name}: {value}" for name, value in headers().items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + payload)
    await asyncio.sleep(after_s)
    writer.transport.abort()


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2])
async def test_r7_a_harness_that_left_and_asks_again_gets_what_it_asked_for(after_s: float) -> None:
    async with make_world(headers_s=0.1, keep_alive_s=0.1) as world:
        await world.gate.open()
        world.engine.delay_s = 0.4
        await leave(world, after_s)
        await asyncio.sleep(0.1)
        assert (await world.call()).content.strip() == b'{"ok":true}'
        assert len(world.engine.requests) <= 1 + (after_s == 0.0)
        assert len(world.recorded) == 1


async def test_r7_a_harness_that_stays_away_ends_its_call_after_the_grace_time() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.engine.delay_s = 60.0
        await leave(world, 0.1)
        assert len(world.engine.flights) == 1
        await asyncio.sleep(1.5)
        assert len(world.engine.flights) == 0
        assert world.recorded == []


async def test_r7_no_call_is_ended_while_the_engine_sleeps() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.engine.delay_s = 2.0
        world.engine.flights.is_frozen = True
        await leave(world, 0.1)
        await asyncio.sleep(1.2)
        world.engine.flights.is_frozen = False
        assert (await world.call()).status_code == 200
        assert len(world.engine.requests) == 1


@pytest.mark.parametrize("reply", ["recorded", "live"])
async def test_a_connection_to_the_engine_cut_in_any_place_samples_once(reply: str) -> None:
    async with make_world(reply=reply) as world:
        await world.gate.open()
        play(world, "messages", streamed=True)
        world.engine.chunk_s = 0.02
        for num_cuts in range(3):
            world.engine.cut_replies = num_cuts
            assert await Clients(world).text("messages", streamed=True) == "héy"
        assert len(world.engine.requests) == len(world.recorded) == 3


async def test_a_cut_connection_is_mended_at_the_engine_that_has_the_call() -> None:
    other = FakeEngine()
    async with serving(other) as url_of_other, make_world(more_urls=[url_of_other]) as world:
        await world.gate.open()
        for number in range(6):
            world.engine.cut_replies = other.cut_replies = 1
            rollout = f"r{number}"
            assert (await world.call(rollout=rollout, key=make_key(rollout))).status_code == 200
        assert world.engine.requests
        assert other.requests
        assert len(world.engine.requests) + len(other.requests) == len(world.recorded) == 6


async def test_a_reply_that_was_recorded_and_lost_on_its_way_is_recorded_once() -> None:
    async with make_world() as world:
        await world.gate.open()
        world.record_s = 0.4
        await leave(world, 0.2)
        assert (await world.call()).status_code == 200
        assert len(world.engine.requests) == len(world.recorded) == 1
        assert world.num_records == 2


async def test_the_end_of_a_live_stream_waits_for_the_record() -> None:
    async with make_world(reply="live") as world:
        await world.gate.open()
        play(world, "messages", streamed=True)
        world.engine.chunk_s = 0.05
        seen = b""
        request = world.client.build_request(
            "POST", url("messages"), content=content({"stream": True}), headers=headers()
        )
        reply = await world.client.send(request, stream=True)
        async for chunk in reply.aiter_raw():
            seen += chunk
            if b"message_delta" in seen:
                assert len(world.recorded) == 1
            elif b"content_block" in seen:
                assert world.recorded == []
        assert seen == b"".join(f"{event}\n\n".encode() for event in CHAT["messages"])
        assert world.recorded[0].response == seen


async def test_a_live_stream_whose_attempt_ended_never_ends_well() -> None:
    async with make_world(reply="live") as world:
        await world.gate.open()
        play(world, "chat/completions", streamed=True)
        world.ended.add("r1")
        reply = await world.call(body={"stream": True})
        assert "[DONE]" not in reply.text
        assert "has ended" in reply.text


async def test_a_late_error_to_a_plain_request_cuts_the_connection_so_that_it_is_asked_again() -> (
    None
):
    async with make_world(**IMPATIENT) as world:
        await world.gate.open()
        play(world, "chat/completions", streamed=False)
        good = world.engine.handler
        too_long = b'{"error":{"message":"no"}}'
        replies = [(400, {}, [too_long], []), good("", b"")]
        world.engine.handler = lambda path, body: replies.pop(0)
        world.engine.delay_s = 0.4
        clients = Clients(world, max_retries=2)
        assert await clients.text("chat/completions", streamed=False) == "héy"


async def test_five_hundred_held_calls_all_get_their_answer() -> None:
    async with make_world(hold_s=60.0, headers_s=0.2, keep_alive_s=1.0) as world:
        play(world, "messages", streamed=True)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            str(world.client.base_url), connector=connector
        ) as session:

            async def ask(number: int) -> bytes:
                rollout = {"rollout": f"r{number}", "key": make_key(f"r{number}")}
                async with session.post(
                    url("messages", **rollout), json={"stream": True}, headers=headers(**rollout)
                ) as reply:
                    return await reply.read()

            asking = [asyncio.create_task(ask(number)) for number in range(500)]
            await asyncio.sleep(3.0)
            assert world.recorded == []
            await world.gate.open()
            bodies = await asyncio.gather(*asking)
        assert all(body.endswith(b'message_stop"}\n\n') for body in bodies)
        assert all(b"event: ping" in body for body in bodies)
        assert len(world.recorded) == 500
