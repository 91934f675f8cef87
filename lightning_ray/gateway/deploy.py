"""The gateway on Ray Serve: one deployment, any number of stateless replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from ray import serve
from ray.serve.config import HTTPOptions

from lightning_ray import wire
from lightning_ray.config import Config
from lightning_ray.errors import ConfigError, EngineError, boundary
from lightning_ray.gateway.app import Ties, create_app
from lightning_ray.gateway.gate import GateState, Lease
from lightning_ray.store import Exchange

APP = "lightning-ray"
_PORTS = range(20000, 32768)
"""Above those that Ray gives its workers, below those that Linux gives outgoing connections."""
_GATHER_S = 0.004
"""Exchanges that end within this time go to the store in one message."""


def serve_environment(config: Config, scratch: str) -> dict[str, str]:
    """Variables every Ray process needs before it starts, for the ingress this run wants.

    scratch: a folder for HAProxy's own files; its default is one for the whole machine.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if config.gateway.haproxy else "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{scratch}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{scratch}/admin.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": scratch,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{scratch}/server-state",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        # a change of replicas must not cut calls that are held through a weight update
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # when a run ends its harnesses have ended; 30 s of draining would be waited for in vain
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "0.5",
        # the app never blocks: a thread of its own would only cost hand-overs
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    }


def start_gateway(
    config: Config, *, engine_urls: Sequence[str], secret: str, namespace: str
) -> str:
    """Deploy the gateway and return its base URL; ConfigError when the port is taken."""
    host, port = config.gateway.host, config.gateway.port or _free_port()
    check_free(host, port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(
        proxy_location="HeadOnly",
        http_options=HTTPOptions(host=host, port=port, request_timeout_s=None),
    )

    def build() -> Any:
        return _build(config, engine_urls, secret, namespace)

    @serve.deployment(
        name="gateway",
        num_replicas=config.gateway.replicas,
        max_ongoing_requests=4096,
        graceful_shutdown_timeout_s=2,
        ray_actor_options={"num_cpus": 0.1},
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    @serve.ingress(build)
    class Gateway:
        """The app's replica."""

    serve.run(
        Gateway.bind(),  # type: ignore[attr-defined]
        name=APP,
        route_prefix="/",
        blocking=False,
    )
    return f"http://{host}:{port}"


def stop_gateway() -> None:
    """Take the deployment and Serve itself down."""
    serve.shutdown()


def stop_haproxy(scratch: str) -> None:
    """End the HAProxy whose files are in this folder: it outlives the actor that started it."""
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith(scratch) for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()


def _build(config: Config, engine_urls: Sequence[str], secret: str, namespace: str) -> Any:
    """Runs in the replica."""
    gate = ray.get_actor("gate", namespace=namespace)
    store = ray.get_actor("store", namespace=namespace)
    replica = uuid.uuid4().hex

    async def poll(epoch: int, in_flight: int) -> GateState:
        with boundary(EngineError, "asking the gate", ray.exceptions.RayError):
            state: GateState = await gate.poll.remote(replica, epoch=epoch, in_flight=in_flight)
        return state

    async def report(epoch: int, in_flight: int) -> None:
        with boundary(EngineError, "telling the gate", ray.exceptions.RayError):
            await gate.report.remote(replica, epoch=epoch, in_flight=in_flight)

    recorder = _Recorder(store)

    async def earlier(rollout_id: str, attempt: int) -> list[tuple[bytes, bytes]]:
        with boundary(EngineError, "reading earlier calls", ray.exceptions.RayError):
            found: list[tuple[bytes, bytes]] = await store.bodies.remote(rollout_id, attempt)
        return found

    settings = config.gateway
    ties = Ties(
        engine_urls=engine_urls,
        secret=secret,
        served_name=config.model.served_name,
        sampling={
            "train": _sampling(config.collect.sampling),
            "validate": _sampling(config.collect.validation_sampling),
            "serve": wire.Sampling(),
        },
        record=recorder.record,
        earlier=earlier,
        reply=settings.reply,
        hold_s=settings.hold_s,
        engine_s=settings.engine_s,
        headers_s=settings.headers_s,
        keep_alive_s=settings.keep_alive_s,
    )
    return create_app(Lease(poll=poll, report=report), ties)


class _Recorder:
    """Brings exchanges to the store; those that come while it writes go together in one message."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._waiting: list[tuple[Exchange, asyncio.Future[None]]] = []
        self._sending: asyncio.Task[None] | None = None

    async def record(self, exchange: Exchange) -> None:
        """Returns when the exchange is durable."""
        durable = asyncio.get_running_loop().create_future()
        self._waiting.append((exchange, durable))
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send())
        await durable

    async def _send(self) -> None:
        while self._waiting:
            await asyncio.sleep(_GATHER_S)
            sent, self._waiting = self._waiting, []
            try:
                results = await self._store.append_all.remote([exchange for exchange, _ in sent])
            except ray.exceptions.RayError as error:
                results = [EngineError(f"the store did not take the call: {error}")] * len(sent)
            for (_, durable), failure in zip(sent, results, strict=True):
                if not durable.done():
                    durable.set_exception(failure) if failure else durable.set_result(None)


def _sampling(settings: Any) -> wire.Sampling:
    return wire.Sampling(**settings.model_dump())


def _free_port() -> int:
    """One that nothing listens on, and that no outgoing connection is given before we do."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise ConfigError(f"no port of {_PORTS.start}-{_PORTS.stop - 1} is free on this machine")


def check_free(host: str, port: int) -> None:
    """ConfigError when nothing can listen there."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        raise ConfigError(
            f"gateway.port {port} on {host} cannot be used: {os.strerror(error.errno or 0)}. "
            "Choose another, or 0 for a free one."
        ) from error
