"""What the gateway adds to an engine: requests/s and latency, durable recording on.

    python -m jobs.bench.gateway [--seconds 5] [--clients 1 16 64] [--bytes 8000]

The engine is a stub that answers at once in the real frames, in a process of its own, so what is
measured is the gateway: Ray Serve with HAProxy, admission, the store's group commit. The same load
goes to the stub directly for comparison. Load generator, stub and gateway share this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
import uuid
from typing import Any

import aiohttp
import msgspec
import ray

from lightning_ray import wire
from lightning_ray.config import Config
from lightning_ray.gateway.deploy import serve_environment, start_gateway, stop_gateway
from lightning_ray.gateway.gate import Gate
from lightning_ray.gateway.keys import Claims, sign
from lightning_ray.schema import Rollout, Task
from lightning_ray.store import Store

NAMESPACE, SECRET = "bench", "secret"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--bytes", type=int, default=8000)
    parser.add_argument("--haproxy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()
    pipe, other = multiprocessing.Pipe()
    stub = multiprocessing.get_context("spawn").Process(target=_stub, args=(other,), daemon=True)
    stub.start()
    engine_url = pipe.recv()
    base_url, actors = _start(engine_url, options)
    body = json.dumps(
        {
            "model": "x",
            "max_tokens": 16,
            "messages": [{"role": "user", "content": "x" * options.bytes}],
        }
    ).encode()
    print(f"{options.bytes} B bodies, {options.seconds:.0f} s each, durable recording on")
    for clients in options.clients:
        for name, url in (("engine", engine_url), ("gateway", base_url)):
            rate, p50, p99 = asyncio.run(_load(url, name, body, clients, options.seconds))
            who = f"{clients:>3} clients  {name:<8}"
            print(f"{who} {rate:7.0f}/s  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms")
    del actors
    stop_gateway()
    ray.shutdown()


def _start(engine_url: str, options: argparse.Namespace) -> tuple[str, list[Any]]:
    """The gateway's base URL, and the actors, which live as long as they are held."""
    import os

    config = Config.model_validate(
        {
            "name": "bench",
            "model": {"path": "none"},
            "gateway": {"haproxy": options.haproxy, "replicas": options.replicas},
        }
    )
    os.environ.update(serve_environment(config, tempfile.mkdtemp(prefix="lr-")))
    ray.init(address="local", namespace=NAMESPACE, num_cpus=4, log_to_driver=False)
    gate = ray.remote(num_cpus=0, max_concurrency=1000)(Gate).options(name="gate").remote()
    store = (
        ray.remote(num_cpus=0, max_concurrency=10000)(Store)
        .options(name="store")
        .remote(tempfile.mkdtemp(prefix="lr-"))
    )
    for index in range(64):
        task = Task(task_id="t", data_json="{}")
        rollout = Rollout(rollout_id=f"r{index}", group_id="g", task=task, mode="train", step=0,
                          attempt=0)  # fmt: skip
        ray.get(store.begin.remote(rollout))
    url = start_gateway(config, engine_urls=[engine_url], secret=SECRET, namespace=NAMESPACE)
    ray.get(gate.open.remote())
    return url, [gate, store]


async def _load(
    url: str, name: str, body: bytes, clients: int, seconds: float
) -> tuple[float, float, float]:
    """Requests/s, and p50 and p99 in milliseconds."""
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds + 1.0

    async def client(index: int, session: aiohttp.ClientSession) -> None:
        rollout = f"r{index % 64}"
        key = sign(Claims(rollout, 0, "train", time.time() + 3600), secret=SECRET)
        prefix = "" if name == "engine" else f"/rollout/{rollout}/attempt/0"
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        while (began := time.perf_counter()) < deadline:
            async with session.post(
                f"{url}{prefix}/v1/chat/completions", data=body, headers=headers
            ) as reply:
                await reply.read()
                assert reply.status == 200, await reply.text()
            if began > deadline - seconds:  # the first second warms up
                latencies.append(time.perf_counter() - began)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(index, session) for index in range(clients)))
    cuts = statistics.quantiles(latencies, n=100)
    return len(latencies) / seconds, cuts[49] * 1000, cuts[98] * 1000


def _stub(pipe: multiprocessing.connection.Connection) -> None:
    """An engine that samples 16 tokens in no time."""
    from aiohttp import web

    raw = bytes(4 * 16)
    capture = wire.Capture(bytes(4 * 2000), raw, raw, raw, "stop")
    rest = wire.frame(wire.BODY, b'{"choices":[]}')
    rest += wire.frame(wire.CAPTURES, wire.encode_captures([capture]))

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if request.path == wire.DELIVERED_PATH:
            return web.Response()
        head = wire.Head(200, [("content-type", "application/json")], uuid.uuid4().hex)
        reply = wire.frame(wire.HEAD, msgspec.json.encode(head)) + rest
        return web.Response(body=reply, content_type=wire.MEDIA_TYPE)

    async def serve() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        pipe.send(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
