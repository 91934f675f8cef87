"""What the gateway adds to an engine: requests/s and latency, and what held calls cost.

    python -m jobs.bench.gateway [--clients 1 16 64 256] [--bytes 8000 400000] [--replicas 2]
        [--no-haproxy] [--no-record] [--chunks 200] [--reply live] [--held 500]

The engine is a stub that answers at once in the real frames, in a process of its own, so what is
measured is the gateway: Ray Serve and its ingress, admission, the store's group commit. The same
load goes to the stub directly for comparison. Load generator, stub and gateway share this machine;
the first two speak bare HTTP/1.1, so that the machine is left to the gateway.
`--chunks` streams replies of so many events; `--no-record` puts a fake store that only says yes in
place of the store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import urllib.parse
import uuid
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import msgspec
import psutil
import ray
import uvloop

from lightning_ray import wire
from lightning_ray.config import Config
from lightning_ray.gateway.deploy import serve_environment, start_gateway, stop_gateway
from lightning_ray.gateway.gate import Gate
from lightning_ray.gateway.keys import Claims, sign
from lightning_ray.schema import Rollout, Task
from lightning_ray.store import Exchange, Store

NAMESPACE, SECRET = "bench", "secret"
NUM_ROLLOUTS = 512
PARTS = {"replica": "ServeReplica:lightning-ray", "store": "ray::Store", "ingress": "haproxy -"}
"""The gateway's processes, by words of their command lines; the CPU ms per call is printed."""


class FakeStore:
    """Says that everything is durable."""

    async def append_all(self, exchanges: list[Exchange]) -> list[None]:
        return [None] * len(exchanges)


def main() -> None:
    options = _options()
    pipe, other = multiprocessing.Pipe()
    stub = multiprocessing.get_context("spawn").Process(
        target=_stub, args=(other, options.chunks), daemon=True
    )
    stub.start()
    engine_url = pipe.recv()
    base_url, gate, store = _start(engine_url, options)
    print(
        {name: value for name, value in vars(options).items() if name not in ("clients", "bytes")}
    )
    for size in options.bytes:
        body = _body(size, streamed=options.chunks > 0)
        for clients in options.clients:
            for name, url in (("engine", engine_url), ("gateway", base_url)):
                before = _cpu_s()
                rate, p50, p99, num = uvloop.run(_load(url, name, body, clients, options.seconds))
                spent = {part: (s - before[part]) / num * 1000 for part, s in _cpu_s().items()}
                chunks = f"  {rate * options.chunks:8.0f} chunks/s" if options.chunks else ""
                print(
                    f"{size:>8} B {clients:>4} clients  {name:<8}{rate:7.0f}/s  p50 {p50:6.1f} ms"
                    f"  p99 {p99:6.1f} ms{chunks}"
                    + "".join(
                        f"  {part} {ms:.2f}" for part, ms in spent.items() if name != "engine"
                    )
                )
    if options.held:
        asyncio.run(_hold(base_url, gate, options.held))
    del store
    stop_gateway()
    ray.shutdown()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--bytes", type=int, nargs="+", default=[8000])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--haproxy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--record", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--reply", choices=["recorded", "live"], default="recorded")
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--held", type=int, default=0)
    return parser.parse_args()


def _body(size: int, *, streamed: bool) -> bytes:
    messages = [{"role": "user", "content": "x" * (size // 20)} for _ in range(20)]
    return json.dumps(
        {"model": "x", "max_tokens": 16, "stream": streamed, "messages": messages}
    ).encode()


def _start(engine_url: str, options: argparse.Namespace) -> tuple[str, Any, Any]:
    """The gateway's base URL, the gate and the store; the actors live as long as they are held."""
    config = Config.model_validate(
        {
            "name": "bench",
            "model": {"path": "none"},
            "gateway": {
                "haproxy": options.haproxy, "replicas": options.replicas, "reply": options.reply,
            },
        }
    )  # fmt: skip
    os.environ.update(serve_environment(config, tempfile.mkdtemp(prefix="lr-")))
    ray.init(address="local", namespace=NAMESPACE, num_cpus=4, log_to_driver=False)
    gate = ray.remote(num_cpus=0, max_concurrency=1000)(Gate).options(name="gate").remote()
    actor = ray.remote(num_cpus=0, max_concurrency=10000)
    if options.record:
        folder = tempfile.mkdtemp(prefix="lightning-ray-bench-")
        store = actor(Store).options(name="store").remote(folder)
        ray.get([store.begin.remote(_rollout(index)) for index in range(NUM_ROLLOUTS)])
    else:
        store = actor(FakeStore).options(name="store").remote()
    url = start_gateway(config, engine_urls=[engine_url], secret=SECRET, namespace=NAMESPACE)
    ray.get(gate.open.remote())
    return url, gate, store


def _rollout(index: int) -> Rollout:
    task = Task(task_id="t", data_json="{}")
    return Rollout(
        rollout_id=f"r{index}", group_id="g", task=task, mode="train", step=0, attempt=0
    )  # fmt: skip


def _seat(index: int) -> tuple[str, dict[str, str]]:
    """The path and headers of one rollout."""
    rollout = f"r{index % NUM_ROLLOUTS}"
    key = sign(Claims(rollout, 0, "train", time.time() + 3600), secret=SECRET)
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    return f"/rollout/{rollout}/attempt/0", headers


async def _load(
    url: str, name: str, body: bytes, clients: int, seconds: float
) -> tuple[float, float, float, int]:
    """Requests/s, p50 and p99 in milliseconds, and all requests with those of the first second."""
    latencies: list[float] = []
    num_requests = 0
    deadline = time.perf_counter() + seconds + 1.0
    address = urllib.parse.urlsplit(url)

    async def client(index: int) -> None:
        nonlocal num_requests
        prefix, headers = _seat(index)
        path = f"{'' if name == 'engine' else prefix}/v1/chat/completions"
        head = _head(path, {**headers, "host": address.netloc}, len(body) + 9)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while (began := time.perf_counter()) < deadline:
            # no two calls are the same, as a harness's are not
            writer.write(b'%s{"n":%4d,%s' % (head, num_requests % 10000, body[1:]))
            status, text = await _reply(reader)
            assert status == 200, text
            num_requests += 1
            if began > deadline - seconds:  # the first second warms up
                latencies.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*map(client, range(clients)))
    cuts = statistics.quantiles(latencies, n=100)
    return len(latencies) / seconds, cuts[49] * 1000, cuts[98] * 1000, num_requests


def _head(path: str, headers: dict[str, str], size: int) -> bytes:
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = f"POST {path} HTTP/1.1\r\n{''.join(lines)}content-length: {size}\r\n\r\n"
    return head.encode()


async def _reply(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Status and body of the next reply on a connection."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b"content-length: " in head:
        body = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    else:
        body = b""
        while not body.endswith(b"0\r\n\r\n"):
            body += await reader.readuntil(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]), body


async def _hold(url: str, gate: Any, number: int) -> None:
    """So many calls wait at a closed gate for half a minute; what that costs the gateway."""
    await gate.close.remote(0.0)
    body, before = _body(8000, streamed=True), _resident()

    async def call(index: int, session: aiohttp.ClientSession) -> bool:
        prefix, headers = _seat(index)
        path = f"{url}{prefix}/v1/chat/completions"
        async with session.post(path, data=body, headers=headers) as reply:
            await reply.read()
            return reply.status == 200

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        asking = [asyncio.create_task(call(index, session)) for index in range(number)]
        await asyncio.sleep(30)
        peak = _resident()
        await gate.open.remote()
        answered = sum(await asyncio.gather(*asking))
    print(
        f"{number} calls held for 30 s: {answered} answered, gateway {before >> 20} -> "
        f"{peak >> 20} MiB resident"
    )


def _resident() -> int:
    """Memory of the gateway's replicas."""
    return sum(process.memory_info().rss for process in _processes(PARTS["replica"]))


def _cpu_s() -> dict[str, float]:
    """CPU seconds that each part of the gateway has used."""
    times = {part: [p.cpu_times() for p in _processes(words)] for part, words in PARTS.items()}
    return {part: sum(t.user + t.system for t in found) for part, found in times.items()}


def _processes(words: str) -> list[psutil.Process]:
    return [
        process for process in psutil.process_iter(["cmdline"])
        if words in " ".join(process.info["cmdline"] or [])
    ]  # fmt: skip


def _stub(pipe: Connection, chunks: int) -> None:
    """An engine that samples 16 tokens in no time."""
    raw = bytes(4 * 16)
    capture = wire.Capture(bytes(4 * 2000), raw, raw, raw, "stop")
    event = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"word"}}]}\n\n'
    bodies = [event] * chunks + [b"data: [DONE]\n\n"] if chunks else [b'{"choices":[]}']
    kind = "text/event-stream" if chunks else "application/json"
    rest = b"".join(wire.frame(wire.BODY, body) for body in bodies)
    rest += wire.frame(wire.CAPTURES, wire.encode_captures([capture]))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]
                await reader.readexactly(int(size))
                start = wire.Head(200, [("content-type", kind)], uuid.uuid4().hex)
                reply = wire.frame(wire.HEAD, msgspec.json.encode(start)) + rest
                lines = f"HTTP/1.1 200 OK\r\ncontent-length: {len(reply)}\r\n\r\n"
                writer.write(lines.encode() + reply)

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 22)
        pipe.send(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await server.serve_forever()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
