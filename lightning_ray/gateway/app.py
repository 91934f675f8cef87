"""The recording gateway: identify, admit, forward, record, reply.

It forwards bytes and does not know what a token is; captures pass through it unread. It knows
neither Ray nor vLLM: `deploy.py` hands it the store, the gate and the engines' addresses.

A harness that waits long is told so in its own dialect, and never hears of a pause or of an engine
that had to be asked again. A harness that asks again gets the reply it asked for the first time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import msgspec
import xxhash
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lightning_ray import wire
from lightning_ray.errors import EngineError, RecordError
from lightning_ray.gateway import requests
from lightning_ray.gateway.dialects import DIALECTS, Dialect
from lightning_ray.gateway.engines import NO_CAPTURES, Engines, Reply, Show
from lightning_ray.gateway.gate import Lease
from lightning_ray.gateway.keys import Claims, KeyRefused, verify
from lightning_ray.gateway.outgoing import Outgoing
from lightning_ray.store import Exchange

MAX_BODY_BYTES = 64 << 20


@dataclass(frozen=True)
class Ties:
    """What the gateway needs of the run; times in seconds."""

    engine_urls: Sequence[str]
    secret: str
    served_name: str
    sampling: Mapping[str, wire.Sampling]
    """By mode, what every call of a rollout in that mode must use."""
    record: Callable[[Exchange], Awaitable[None]]
    """Returns when the exchange is durable; RecordError when its attempt has ended."""
    earlier: Callable[[str, int], Awaitable[Sequence[tuple[bytes, bytes]]]]
    """The request and response bodies recorded of an attempt."""
    reply: Literal["recorded", "live"] = "recorded"
    hold_s: float = 900.0
    """A call waits so long while weights move, before it is told 503;"""
    engine_s: float = 60.0
    """so long for an engine that does not answer;"""
    headers_s: float = 10.0
    """so long before its reply's headers leave, and the first keep-alive with them;"""
    keep_alive_s: float = 4.0
    """and so long from one keep-alive to the next."""


def create_app(lease: Lease, ties: Ties) -> ASGIApp:
    """The gateway's ASGI app."""
    gateway = _Gateway(lease, ties)
    rest = Starlette(
        routes=[Route("/health", lambda request: Response("ok"))], lifespan=gateway.lifespan
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # calls go past Starlette's router and middleware, which wrap every send
        is_call = scope["type"] != "lifespan" and scope["path"].startswith("/rollout/")
        await (gateway if is_call else rest)(scope, receive, send)

    return app


@dataclass(frozen=True)
class _Call:
    """One request of a harness."""

    dialect: Dialect
    claims: Claims
    raw: bytes
    prepared: requests.Prepared
    kind: requests.Kind
    thread: str
    client: dict[str, str]
    reply_id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    started_at: float = field(default_factory=time.time)

    @cached_property
    def key(self) -> str:
        """The same for a request that is sent again."""
        digest = xxhash.xxh3_128(f"{self.dialect.path}\0{self.thread}\0".encode())
        digest.update(self.raw)
        return f"{self.claims.rollout_id}/{self.claims.attempt}/{digest.hexdigest()}"


class _Gateway:
    def __init__(self, lease: Lease, ties: Ties) -> None:
        self.lease = lease
        self.ties = ties
        self.engines = Engines(ties.engine_urls, ties.secret, patience_s=ties.engine_s)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The lease and the connections to the engines live as long as the replica."""
        keeper = asyncio.create_task(self.lease.keep())
        async with self.engines.connected():
            yield
        keeper.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request below `/rollout`."""
        if scope["type"] == "websocket":  # Codex tries one first, and takes HTTP when told so
            refusal = {"type": "websocket.http.response.start", "status": 426, "headers": []}
            await send(refusal)
            return await send({"type": "websocket.http.response.body", "body": b"use HTTP"})
        request = Request(scope, receive, send)
        rollout_id, attempt, path = _parts(request)
        dialect = DIALECTS.get(path, DIALECTS["models"])
        try:
            if path in ("", "api/hello"):  # some clients probe the base URL before their first call
                return await Response("ok")(scope, receive, send)
            if path not in DIALECTS:
                known = ", ".join(f"/v1/{path}" for path in DIALECTS)
                raise _Refused(404, f"no route `/{path}` here; there are {known}")
            claims = self._identify(request, rollout_id, attempt)
            if dialect.samples:
                call = await self._read(request, dialect, claims)
                return await self._deliver(call, request.receive, send)
            response = await self._pass_on(request, dialect, claims)
        except (_Refused, EngineError) as error:
            response = _json(dialect.error(error.status, str(error)), error.status)
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    def _identify(self, request: Request, rollout_id: str, attempt: str) -> Claims:
        """Who calls, from the path, and only if the key was made for just that attempt."""
        if request.headers.get("upgrade", "").lower() == "websocket":
            raise _Refused(426, "no websockets here; use HTTP")
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            raise _Refused(401, "a key is needed, as `Authorization: Bearer` or `x-api-key`")
        with _refusing(401, KeyRefused):
            claims = verify(key.strip(), secret=self.ties.secret)
        if (claims.rollout_id, str(claims.attempt)) != (rollout_id, attempt):
            raise _Refused(404, f"this key knows no rollout `{rollout_id}`, attempt {attempt}")
        return claims

    async def _pass_on(self, request: Request, dialect: Dialect, claims: Claims) -> Response:
        """A request that samples nothing."""
        body = await _body(request)
        if request.method == "POST":
            with _refusing(400, ValueError):
                body = self._prepare(requests.decode(body), dialect, claims).body()
        reply = await self.engines.ask(claims.rollout_id, request.method, dialect.path, body, {})
        if reply.status >= 400:
            return _json(dialect.engine_error(reply.status, reply.body), reply.status)
        return _json(reply.body, reply.status)

    async def _read(self, request: Request, dialect: Dialect, claims: Claims) -> _Call:
        """The call a request makes."""
        raw = await _body(request)
        with _refusing(400, ValueError):
            fields = requests.decode(raw)
            if fields.get("previous_response_id"):
                earlier = await self.ties.earlier(claims.rollout_id, claims.attempt)
                with _refusing(404, KeyError):
                    fields = requests.with_conversation(fields, earlier)
            prepared = self._prepare(fields, dialect, claims)
        kind, thread, client = requests.describe(fields, request.headers)
        if prepared.dropped:
            client["dropped"] = ", ".join(prepared.dropped)
        call = _Call(dialect, claims, raw, prepared, kind, thread, client)
        if dialect.name == "responses":
            prepared.fields["request_id"] = call.reply_id
        return call

    def _prepare(self, fields: Any, dialect: Dialect, claims: Claims) -> requests.Prepared:
        sampling, name = self.ties.sampling[claims.mode], self.ties.served_name
        return requests.prepare(fields, dialect, served_name=name, sampling=sampling)

    async def _deliver(self, call: _Call, receive: Receive, send: Send) -> None:
        """Sample, and bring the reply to the harness; keep it waiting in its dialect until then.

        _Refused and EngineError pass as long as no header has left.
        """
        prepared = call.prepared
        outgoing = Outgoing(
            call.dialect, send, streamed=prepared.streamed, seals=prepared.seals_reasoning,
            reply_id=call.reply_id,
        )  # fmt: skip
        is_live = self.ties.reply == "live" and prepared.streamed
        sampling = asyncio.ensure_future(self._sample(call, outgoing.show if is_live else None))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            wait_s = self.ties.headers_s
            while not await _first(sampling, leaving, wait_s):
                await outgoing.keep_alive()
                wait_s = self.ties.keep_alive_s
            if not sampling.done():
                return
            reply = await _told(sampling, call.dialect, outgoing)
            if reply is not None and reply.status < 400 and not leaving.done():
                self.engines.delivered(reply, call.key)
        finally:
            sampling.cancel()
            leaving.cancel()

    async def _sample(self, call: _Call, show: Show | None) -> Reply:
        """Admit, forward, record; the reply is durable when this returns."""
        headers = {
            wire.SAMPLING_HEADER: msgspec.json.encode(call.prepared.sampling).decode(),
            wire.CALL_HEADER: call.key,
        }
        rollout_id, path, dialect = call.claims.rollout_id, call.dialect.path, call.dialect
        async with self.lease.admit(self.ties.hold_s):
            body = call.prepared.body()
            try:
                reply = await self.engines.ask(rollout_id, "POST", path, body, headers, show)
                if reply.status >= 400:
                    problem = dialect.engine_error(reply.status, reply.body)
                    reply = replace(reply, body=problem)
            except EngineError as error:
                problem = dialect.error(error.status, str(error))
                reply = Reply(error.status, [], problem, NO_CAPTURES, uuid.uuid4().hex, "")
            await self._record(call, reply)
        if reply.status >= 400:  # nothing was sampled: asked again, it is tried again
            self.engines.delivered(reply, call.key)
        return reply

    async def _record(self, call: _Call, reply: Reply) -> None:
        exchange = Exchange(
            exchange_id=reply.exchange_id,
            rollout_id=call.claims.rollout_id,
            attempt=call.claims.attempt,
            dialect=call.dialect.name,
            kind=call.kind,
            thread=call.thread,
            client_json=msgspec.json.encode(call.client).decode(),
            status=reply.status,
            started_at=call.started_at,
            duration_s=time.time() - call.started_at,
            request=call.raw,
            response=reply.body,
            captures=reply.captures,
        )
        with _refusing(409, RecordError):
            # a client that leaves must not leave a half-recorded call
            await asyncio.shield(self.ties.record(exchange))


class _Refused(Exception):
    """The caller is told this, in its dialect."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def _refusing(status: int, *catching: type[Exception]) -> Iterator[None]:
    try:
        yield
    except catching as error:
        raise _Refused(status, str(error)) from error


def _parts(request: Request) -> tuple[str, str, str]:
    """Rollout, attempt and dialect path of `/rollout/{id}/attempt/{n}[/v1]/{path}`."""
    words = request.scope["path"].split("/")[2:]
    rollout_id, is_attempt, attempt, *rest = [*words, "", "", ""][: max(3, len(words))]
    path = "/".join(rest).strip("/")
    if is_attempt != "attempt" or not rollout_id:
        path = "no-attempt"
    return rollout_id, attempt, path.removeprefix("v1/").removeprefix("v1")


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _Refused(413, f"a body may have {MAX_BODY_BYTES >> 20} MiB")
        if chunk:  # a body in one piece is not copied
            chunks.append(chunk)
    return b"".join(chunks)


async def _left(receive: Receive) -> None:
    """Returns when the harness has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _first(one: asyncio.Future[Any], other: asyncio.Future[Any], wait_s: float) -> bool:
    """Whether one of them is done within the time."""
    done, _ = await asyncio.wait({one, other}, timeout=wait_s, return_when="FIRST_COMPLETED")
    return bool(done)


async def _told(
    sampling: asyncio.Future[Reply], dialect: Dialect, outgoing: Outgoing
) -> Reply | None:
    """Send the reply and return it; None when it is an error that could only be told late."""
    try:
        reply = sampling.result()
    except (_Refused, EngineError) as error:
        if not outgoing.has_started:
            raise
        await outgoing.fail(error.status, dialect.error(error.status, str(error)))
        return None
    await outgoing.finish(reply.status, reply.headers, reply.body)
    return reply


def _json(body: bytes, status: int) -> Response:
    return Response(body, status, media_type="application/json")
