"""A fake engine for gateway tests: speaks the frames of `lightning_ray.wire` over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import numpy as np
from aiohttp import web

from lightning_ray import wire

Handler = Callable[
    [web.Request, bytes], tuple[int, dict[str, str], list[bytes], list[wire.Capture]]
]


def capture(prompt: list[int], sampled: list[int]) -> wire.Capture:
    return wire.Capture(
        prompt_ids=np.asarray(prompt, np.int32).tobytes(),
        sampled_ids=np.asarray(sampled, np.int32).tobytes(),
        logprobs=np.zeros(len(sampled), np.float32).tobytes(),
        versions=np.zeros(len(sampled), np.int32).tobytes(),
        finish_reason="stop",
    )


class FakeEngine:
    """Answers every call with the handler's reply; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.delay_s = 0.0
        self.cut_replies = 0
        self.handler: Handler = lambda request, body: (
            200, {"content-type": "application/json"}, [b'{"ok":', b"true}"], [capture([1], [2])],
        )  # fmt: skip

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        yield f"http://127.0.0.1:{port}"
        await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.path, dict(request.headers), body))
        await asyncio.sleep(self.delay_s)
        status, headers, chunks, captures = self.handler(request, body)
        response = web.StreamResponse(headers={"content-type": wire.MEDIA_TYPE})
        await response.prepare(request)
        head = {"status": status, "headers": list(map(list, headers.items()))}
        await response.write(wire.frame(wire.HEAD, msgspec.json.encode(head)))
        for chunk in chunks:
            await response.write(wire.frame(wire.BODY, chunk))
        if self.cut_replies:
            self.cut_replies -= 1
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(wire.frame(wire.CAPTURES, wire.encode_captures(captures)))
        return response
