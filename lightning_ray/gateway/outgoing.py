"""A reply on its way to a harness: headers, keep-alives while it waits, and each byte once."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from lightning_ray.errors import EngineError
from lightning_ray.gateway.dialects import Dialect, after_keep_alives
from lightning_ray.gateway.requests import seal_reasoning

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_KEPT_HEADERS = re.compile(r"content-type|cache-control|x-.*", re.IGNORECASE)


class CannotTell(Exception):
    """Headers have left, and the dialect has no way to say the rest: the connection is cut, so
    that the harness asks again."""


class Outgoing:
    """What has been sent of one reply.

    reply_id: of the Responses object that keep-alives speak of.
    seals:    reasoning goes out encrypted too.
    """

    def __init__(
        self, dialect: Dialect, send: Send, *, streamed: bool, seals: bool, reply_id: str
    ) -> None:
        self.dialect = dialect
        self.send = send
        self.streamed = streamed
        self.seals = seals
        self.reply_id = reply_id
        self.has_started = False
        self._num_keep_alives = 0
        self._opening = 0
        """Keep-alives sent before the first byte of the body."""
        self._num_sent = 0
        """Bytes of the body."""
        self._exchange_id = ""

    async def keep_alive(self) -> None:
        """Tell the harness that its call is alive."""
        if not self.has_started:
            await self._start(200, [("content-type", self._media_type())])
        index = self._num_keep_alives
        await self._body(self.dialect.keep_alive(self.reply_id, index, streamed=self.streamed))
        self._num_keep_alives += 1

    async def show(self, exchange_id: str, body: bytearray) -> None:
        """Send what is new in the body so far, but not the events that end it.

        EngineError when an engine died and another began this reply anew.
        """
        if self._num_sent and exchange_id != self._exchange_id:
            raise EngineError("the engine was lost in the middle of a live reply")
        end = self.dialect.last_event(body, self._num_sent)
        if end > self._num_sent:
            if not self.has_started:
                await self._start(200, [("content-type", self._media_type())])
            self._exchange_id = exchange_id
            await self._part(bytes(body[self._num_sent : end]), more=True)

    async def finish(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        """Send the rest, and end."""
        if self.has_started and status != 200:
            return await self.fail(status, body)
        if not self.has_started:
            await self._start(status, [kv for kv in headers if _KEPT_HEADERS.fullmatch(kv[0])])
        await self._part(body[self._num_sent :], more=False)

    async def fail(self, status: int, problem: bytes) -> None:
        """End with an error body of this dialect; CannotTell when it is too late for one."""
        if not self.has_started:
            await self._start(status, [("content-type", "application/json")])
            return await self._body(problem, more=False)
        if not self.streamed:
            raise CannotTell
        await self._body(
            self.dialect.stream_error(problem, self.reply_id, self._num_keep_alives), more=False
        )

    async def _part(self, part: bytes, *, more: bool) -> None:
        """Send what follows the last part; of a stream, whole events."""
        if not self._num_sent:
            self._opening = self._num_keep_alives
        self._num_sent += len(part)
        if self.seals:
            part = seal_reasoning(part, streamed=self.streamed)
        if self._opening and self.streamed and self.dialect.name == "responses":
            part = after_keep_alives(part, num_sent=self._opening, reply_id=self.reply_id)
        await self._body(part, more=more)

    async def _start(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.has_started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        await self.send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, body: bytes, *, more: bool = True) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": more})

    def _media_type(self) -> str:
        return "text/event-stream; charset=utf-8" if self.streamed else "application/json"
