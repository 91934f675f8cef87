"""The engines as the gateway sees them: asked until one answers, told what was delivered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from lightning_ray import wire
from lightning_ray.errors import EngineError

log = logging.getLogger(__name__)

NO_CAPTURES = wire.encode_captures([])
_FLUSH_S = 0.02
_MAX_PAUSE_S = 2.0


@dataclass(frozen=True)
class Reply:
    """An engine's whole answer."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    captures: bytes
    exchange_id: str
    engine_url: str


Show = Callable[[str, bytearray], Awaitable[None]]
"""Told the exchange and its body so far, whenever more of it has come."""


class Engines:
    """Connections to every engine of a run; a rollout keeps to one, for its earlier calls."""

    def __init__(self, urls: Sequence[str], secret: str, *, patience_s: float) -> None:
        self.urls = urls
        self.secret = secret
        self.patience_s = patience_s
        self._delivered: dict[str, list[str]] = defaultdict(list)
        self._telling: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        """The connections live as long as the block."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield
            await self._tell()

    async def ask(
        self,
        rollout_id: str,
        method: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        show: Show | None = None,
    ) -> Reply:
        """The first whole reply; EngineError when there is none within the patience.

        An engine that was cut off is asked again, and joins the request it has under way; only one
        that cannot be reached is passed over for the next in the rollout's order.
        """
        deadline = asyncio.get_running_loop().time() + self.patience_s
        order = sorted(self.urls, key=lambda url: zlib.crc32(f"{rollout_id}{url}".encode()))
        num_tries = num_gone = 0
        while True:
            url = order[num_gone % len(order)]
            try:
                return await self._ask(url, method, path, body, headers, show)
            except aiohttp.ClientError as error:
                log.warning("%s did not answer /v1/%s (try %d): %r", url, path, num_tries, error)
                num_tries += 1
                num_gone += isinstance(error, aiohttp.ClientConnectorError)
                pause_s = min(0.1 * 2**num_tries, _MAX_PAUSE_S)
                if asyncio.get_running_loop().time() + pause_s > deadline:
                    index = self.urls.index(url)
                    raise EngineError(
                        f"engine/{index} did not answer in {self.patience_s:.0f} s "
                        f"({num_tries} tries); see its log in the Ray dashboard"
                    ) from error
                await asyncio.sleep(pause_s)

    def delivered(self, reply: Reply, key: str) -> None:
        """The harness has this reply: the same request is a new sample from now on."""
        if reply.engine_url:
            self._delivered[reply.engine_url].append(key)
            if self._telling is None or self._telling.done():
                self._telling = asyncio.create_task(self._tell_soon())

    async def _ask(
        self, url: str, method: str, path: str, body: bytes, headers: Mapping[str, str],
        show: Show | None,
    ) -> Reply:  # fmt: skip
        key = headers.get(wire.CALL_HEADER)
        if key in self._delivered[url]:
            await self._tell()
        secret = {wire.SECRET_HEADER: self.secret, "content-type": "application/json"}
        async with self._session.request(
            method, f"{url}/v1/{path}", data=body, headers={**headers, **secret}
        ) as stream:
            reply = await _whole(stream.content.iter_any(), url, show)
        if key is None:
            return reply
        if reply.status == 200 and reply.captures == NO_CAPTURES:
            raise EngineError("the engine answered without a capture", status=500)
        if reply.status >= 500 and reply.captures == NO_CAPTURES:
            await self._tell([key])
            raise aiohttp.ClientPayloadError(f"status {reply.status}: {reply.body[:500]!r}")
        return reply

    async def _tell_soon(self) -> None:
        await asyncio.sleep(_FLUSH_S)
        await self._tell()

    async def _tell(self, also: Sequence[str] = ()) -> None:
        told, self._delivered = self._delivered, defaultdict(list)
        for url in self.urls:
            if keys := [*told[url], *also]:
                with contextlib.suppress(aiohttp.ClientError):  # an engine that is gone forgot
                    await self._post(url, keys)

    async def _post(self, url: str, keys: list[str]) -> None:
        secret = {wire.SECRET_HEADER: self.secret}
        body = msgspec.json.encode(keys)
        async with self._session.post(url + wire.DELIVERED_PATH, data=body, headers=secret):
            return


async def _whole(chunks: AsyncIterator[bytes], url: str, show: Show | None) -> Reply:
    """The reply in an engine's frames; aiohttp.ClientError when it was cut."""
    head: wire.Head | None = None
    body = bytearray()
    async for kind, payload in wire.frames(chunks):
        if kind == wire.HEAD:
            head = msgspec.json.decode(payload, type=wire.Head)
        elif kind == wire.BODY:
            body += payload
            if show is not None and head is not None and head.status == 200:
                await show(head.exchange_id, body)
        elif head is not None:
            return Reply(head.status, head.headers, bytes(body), payload, head.exchange_id, url)
    raise aiohttp.ClientPayloadError("the engine's reply ended early")
