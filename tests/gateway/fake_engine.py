"""A fake engine for gateway tests: the frames of `lightning_ray.wire` and real flights over real
HTTP, without a model."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import uvicorn

from lightning_ray import wire
from lightning_ray.engine.flights import Flights, read_body

Answer = tuple[int, dict[str, str], list[bytes], list[wire.Capture]]
Handler = Callable[[str, bytes], Answer]


def capture(prompt: list[int], sampled: list[int]) -> wire.Capture:
    return wire.Capture(
        prompt_ids=np.asarray(prompt, np.int32).tobytes(),
        sampled_ids=np.asarray(sampled, np.int32).tobytes(),
        logprobs=np.zeros(len(sampled), np.float32).tobytes(),
        versions=np.zeros(len(sampled), np.int32).tobytes(),
        finish_reason="stop",
    )


def stream_of(*events: str) -> Handler:
    """Answers with these events, one by one."""
    headers = {"content-type": "text/event-stream"}
    chunks = [f"{event}\n\n".encode() for event in events]
    return lambda path, body: (200, headers, chunks, [capture([1], [2])])


@asynccontextmanager
async def serving(app: Any, port: int = 0) -> AsyncIterator[str]:
    """The app's base URL, on real HTTP."""
    config = uvicorn.Config(
        app, port=port, log_level="critical", lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await running


class FakeEngine:
    """Answers every call with the handler's reply; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        """What was really run: a request that joined another is not among them."""
        self.delay_s = 0.0
        self.chunk_s = 0.0
        """Before each chunk of a reply."""
        self.cut_replies = 0
        """So many replies break off before their last frame."""
        self.delivered: list[str] = []
        self.flights = Flights(self._run, grace_s=0.5, keep_s=2.0)
        self.handler: Handler = lambda path, body: (
            200, {"content-type": "application/json"}, [b'{"ok":', b"true}"], [capture([1], [2])],
        )  # fmt: skip

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            return await send({"type": "lifespan.shutdown.complete"})
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        if scope["path"] == wire.DELIVERED_PATH:
            keys = msgspec.json.decode(await read_body(receive) or b"[]")
            self.delivered += keys
            self.flights.forget(keys)
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body"})
        if key := headers.get(wire.CALL_HEADER):
            return await self.flights.join(key, scope, receive, self._cutting(send))
        await self._run(scope, receive, send)

    def _cutting(self, send: Any) -> Any:
        async def cutting(message: Any) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and self.cut_replies:
                self.cut_replies -= 1
                raise ConnectionError("cut by the test")
            await send(message)

        return cutting

    async def _run(self, scope: Any, receive: Any, send: Any) -> None:
        body = await read_body(receive) or b""
        headers = {key.decode(): value.decode() for key, value in scope["headers"]}
        self.requests.append((scope["path"], headers, body))
        await asyncio.sleep(self.delay_s)
        status, reply_headers, chunks, captures = self.handler(scope["path"], body)
        content_type = (b"content-type", wire.MEDIA_TYPE.encode())
        await send({"type": "http.response.start", "status": 200, "headers": [content_type]})
        head = wire.Head(status, list(reply_headers.items()), uuid.uuid4().hex)
        frames = [wire.frame(wire.HEAD, msgspec.json.encode(head))]
        frames += [wire.frame(wire.BODY, chunk) for chunk in chunks]
        for part in frames:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(self.chunk_s)
        last = wire.frame(wire.CAPTURES, wire.encode_captures(captures))
        await send({"type": "http.response.body", "body": last})
