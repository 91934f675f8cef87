"""A request that is asked for twice is sampled once: a reply is kept until it was delivered.

A flight is one run of the engine's app for one call key. Whoever asks with the same key joins it
and reads the same reply from its start. The gateway says when the harness has the whole reply;
only after that the same request is a new sample. A flight that nobody follows any more is ended
after a time of grace, since harnesses that were cut off ask again within seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_LOOK_S = 1.0
_END_S = 5.0


class Flights:
    """The requests under way and the replies not delivered yet, by call key.

    grace_s: how long a run goes on without anybody following it.
    keep_s:  how long a finished reply that was not delivered waits to be asked for again.
    """

    def __init__(self, app: App, *, grace_s: float, keep_s: float) -> None:
        self.grace_s = grace_s
        self.keep_s = keep_s
        self.is_frozen = False
        """While the engine sleeps no flight makes progress, and none is ended."""
        self._app = app
        self._flights: dict[str, _Flight] = {}
        self._janitor: asyncio.Task[None] | None = None

    async def join(self, key: str, scope: Message, receive: Receive, send: Send) -> None:
        """Answer from the flight of this key; the first to ask starts it."""
        body = await read_body(receive)
        if body is None:
            return
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(self._app, scope, body)
        if self._janitor is None:
            self._janitor = asyncio.create_task(self._tidy())
        await flight.follow(receive, send)

    def forget(self, keys: Iterable[str]) -> None:
        """These replies have reached their harness: the same request is a new sample now."""
        for key in keys:
            self._flights.pop(key, None)

    def __len__(self) -> int:
        return len(self._flights)

    async def _tidy(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self.grace_s))
            for key, flight in list(self._flights.items()):
                if self.is_frozen:
                    flight.left_at = time.monotonic()
                elif flight.is_over(self.keep_s if flight.is_done else self.grace_s):
                    log.info("nobody asked again for %s; it is ended", key)
                    flight.end()
                    del self._flights[key]


class _Flight:
    def __init__(self, app: App, scope: Message, body: bytes) -> None:
        self.is_done = False
        self.left_at = time.monotonic()
        self._num_followers = 0
        self._is_ended = asyncio.Event()
        self._messages: list[Message] = []
        self._grown = asyncio.Event()
        self.task = asyncio.create_task(self._run(app, scope, body))
        self.task.add_done_callback(_log_failure)

    def is_over(self, limit_s: float) -> bool:
        return not self._num_followers and time.monotonic() - self.left_at > limit_s

    def end(self) -> None:
        """Tell the app that its caller has left, which ends what it has under way for it."""
        self._is_ended.set()
        # vLLM runs a request in a task of its own, which a cancellation here would leave running
        asyncio.get_running_loop().call_later(_END_S, self.task.cancel)

    async def follow(self, receive: Receive, send: Send) -> None:
        """Send the reply from its start as it grows, until it ends or the follower leaves."""
        self._num_followers += 1
        gone = asyncio.create_task(_disconnected(receive))
        try:
            index = 0
            while not gone.done():
                grown = self._grown
                for message in self._messages[index:]:
                    await send(message)
                    index += 1
                if self.is_done and index == len(self._messages):
                    return
                growth = asyncio.create_task(grown.wait())
                await asyncio.wait({growth, gone}, return_when=asyncio.FIRST_COMPLETED)
                growth.cancel()
        finally:
            gone.cancel()
            self._num_followers -= 1
            self.left_at = time.monotonic()

    async def _run(self, app: App, scope: Message, body: bytes) -> None:
        request = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if request:
                return request.pop()
            await self._is_ended.wait()  # whatever a single follower does
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if self._is_ended.is_set():
                raise OSError("nobody follows this request any more")
            self._messages.append(message)
            self._grow()

        try:
            await app(scope, receive, send)
        finally:
            self.is_done = True
            self._grow()

    def _grow(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


async def read_body(receive: Receive) -> bytes | None:
    """The whole body of a request; None when the caller left before its end."""
    chunks = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a request failed in the engine's app", exc_info=task.exception())
