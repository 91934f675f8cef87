"""The recording gateway: identify, admit, forward, record, reply.

It forwards bytes and does not know what a token is; captures pass through it unread. It knows
neither Ray nor vLLM: `deploy.py` hands it the store, the gate and the engines' addresses.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lightning_ray import wire
from lightning_ray.errors import EngineError, RecordError
from lightning_ray.gateway.dialects import DIALECTS, Dialect
from lightning_ray.gateway.gate import Lease
from lightning_ray.gateway.keys import Claims, KeyRefused, verify
from lightning_ray.store import Exchange

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
_ENGINE_TRIES = 3
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


@dataclass(frozen=True)
class Reply:
    """An engine's whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    captures: bytes


def create_app(
    *,
    engine_urls: Sequence[str],
    secret: str,
    served_name: str,
    sampling: Mapping[str, wire.Sampling],
    lease: Lease,
    record: Callable[[Exchange], Awaitable[None]],
    hold_s: float,
) -> Starlette:
    """The gateway's ASGI app.

    sampling: by mode, what every call of a rollout in that mode must use.
    record:   returns when the exchange is durable; RecordError when its attempt has ended.
    """
    gateway = _Gateway(engine_urls, secret, served_name, sampling, lease, record, hold_s)
    prefix = "/rollout/{rollout_id}/attempt/{attempt:int}"
    methods = ["GET", "POST", "HEAD"]
    return Starlette(
        routes=[
            Route("/health", lambda request: Response("ok")),
            Route(prefix, gateway.hello, methods=["GET", "HEAD"]),
            Route(prefix + "/{path:path}", gateway.answer, methods=methods),
        ],
        lifespan=gateway.lifespan,
    )


class _Gateway:
    def __init__(
        self,
        engine_urls: Sequence[str],
        secret: str,
        served_name: str,
        sampling: Mapping[str, wire.Sampling],
        lease: Lease,
        record: Callable[[Exchange], Awaitable[None]],
        hold_s: float,
    ) -> None:
        self.engine_urls = engine_urls
        self.secret = secret
        self.served_name = served_name
        self.sampling = sampling
        self.lease = lease
        self.record = record
        self.hold_s = hold_s

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """The lease and the connections to the engines live as long as the replica."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        keeper = asyncio.create_task(self.lease.keep())
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self.session:
            yield
        keeper.cancel()

    async def hello(self, request: Request) -> Response:
        """Some clients probe the base URL before their first call."""
        return Response("ok")

    async def answer(self, request: Request) -> Response:
        """One model call, in the dialect its path names."""
        path = request.path_params["path"].removeprefix("v1/").rstrip("/")
        dialect = DIALECTS.get(path)
        if dialect is None:
            if path == "api/hello":
                return Response("ok")
            known = ", ".join(f"/v1/{path}" for path in DIALECTS)
            return _refusal(DIALECTS["models"], 404, f"no route `/{path}` here; there are {known}")
        try:
            caller = self._identify(request)
            body = await _body(request)
            if dialect.samples:
                return await self._sample(dialect, caller, body)
            if request.method == "POST":
                body, _ = self._prepare(dialect, caller, body)
            return _response(await self._send(dialect, caller, request.method, body, {}))
        except _Refused as refused:
            return _refusal(dialect, refused.status, str(refused))
        except EngineError as error:
            return _refusal(dialect, error.status, str(error))

    async def _sample(self, dialect: Dialect, caller: Claims, body: bytes) -> Response:
        """Admit, forward, record, reply."""
        started_at = time.time()
        prepared, sampling = self._prepare(dialect, caller, body)
        headers = {wire.SAMPLING_HEADER: msgspec.json.encode(sampling).decode()}
        async with self.lease.admit(self.hold_s):
            try:
                reply = await self._send(dialect, caller, "POST", prepared, headers)
            except EngineError as error:
                problem = dialect.error(error.status, str(error))
                reply = Reply(error.status, {"content-type": "application/json"}, problem, b"\x90")
            await self._record(dialect, caller, body, reply, started_at)
        return _response(reply)

    def _prepare(
        self, dialect: Dialect, caller: Claims, body: bytes
    ) -> tuple[bytes, wire.Sampling]:
        sampling = self.sampling[caller.mode]
        try:
            return dialect.prepare(body, served_name=self.served_name, sampling=sampling)
        except ValueError as error:
            raise _Refused(400, str(error)) from error

    def _identify(self, request: Request) -> Claims:
        """Who calls, from the path, and only if the key was made for just that attempt."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        key = token if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if not key:
            raise _Refused(401, "a key is needed, as `Authorization: Bearer` or `x-api-key`")
        try:
            claims = verify(key.strip(), secret=self.secret)
        except KeyRefused as refused:
            raise _Refused(401, str(refused)) from refused
        rollout_id, attempt = request.path_params["rollout_id"], request.path_params["attempt"]
        if (claims.rollout_id, claims.attempt) != (rollout_id, attempt):
            raise _Refused(404, f"this key knows no rollout `{rollout_id}`, attempt {attempt}")
        return claims

    async def _send(
        self, dialect: Dialect, caller: Claims, method: str, body: bytes, headers: dict[str, str]
    ) -> Reply:
        """The engine's whole reply; a rollout keeps to one engine, for its prefix cache."""
        index = zlib.crc32(caller.rollout_id.encode()) % len(self.engine_urls)
        url = f"{self.engine_urls[index]}/v1/{dialect.path}"
        headers = headers | {wire.SECRET_HEADER: self.secret, "content-type": "application/json"}
        for attempt in range(_ENGINE_TRIES):
            try:
                async with self.session.request(method, url, data=body, headers=headers) as stream:
                    reply = await _whole(stream.content.iter_any())
            except aiohttp.ClientError as error:
                log.warning("engine/%d did not answer (try %d): %r", index, attempt, error)
                await asyncio.sleep(0.2 * (attempt + 1))
                continue
            if dialect.samples and reply.status == 200 and reply.captures == b"\x90":
                raise EngineError("the engine answered without a capture", status=500)
            return reply
        raise EngineError(
            f"engine/{index} did not answer {_ENGINE_TRIES} times; see its log in the Ray dashboard"
        )

    async def _record(
        self, dialect: Dialect, caller: Claims, body: bytes, reply: Reply, started_at: float
    ) -> None:
        exchange = Exchange(
            rollout_id=caller.rollout_id,
            attempt=caller.attempt,
            dialect=dialect.name,
            status=reply.status,
            started_at=started_at,
            duration_s=time.time() - started_at,
            request=body,
            response=reply.body,
            captures=reply.captures,
        )
        try:
            # a client that leaves must not leave a half-recorded call
            await asyncio.shield(self.record(exchange))
        except RecordError as error:
            raise _Refused(409, str(error)) from error


class _Refused(Exception):
    """The caller is told this, in its dialect."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def _body(request: Request) -> bytes:
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise _Refused(413, f"a body may have {MAX_BODY_BYTES >> 20} MiB")
        chunks.append(chunk)
    return b"".join(chunks)


async def _whole(chunks: AsyncIterator[bytes]) -> Reply:
    """The reply in an engine's frames; aiohttp.ClientError when it was cut."""
    head: dict[str, object] | None = None
    body: list[bytes] = []
    async for kind, payload in wire.frames(chunks):
        if kind == wire.HEAD:
            head = msgspec.json.decode(payload)
        elif kind == wire.BODY:
            body.append(payload)
        elif head is not None:
            headers = {str(k): str(v) for k, v in head["headers"]}  # type: ignore[attr-defined]
            return Reply(int(str(head["status"])), headers, b"".join(body), payload)
    raise aiohttp.ClientPayloadError("the engine's reply ended early")


def _response(reply: Reply) -> Response:
    headers = {k: v for k, v in reply.headers.items() if k.lower() not in _HOP_BY_HOP}
    return Response(reply.body, reply.status, headers)


def _refusal(dialect: Dialect, status: int, message: str) -> Response:
    return Response(dialect.error(status, message), status, media_type="application/json")
