"""Whatever is sent, the answer comes, in the dialect's own shape, and no key opens another door."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest
import ray

from tests.conftest import Stack
from tests.gateway.fuzz import cases
from tests.stack.test_calls import Seat

pytestmark = pytest.mark.heavy

NUM_CASES = int(os.environ.get("LR_FUZZ_CASES", "2000"))


@pytest.mark.timeout(3600)
async def test_damaged_requests_get_an_answer_or_an_error_of_their_dialect(stack: Stack) -> None:
    seat = Seat(stack)
    waiting = list(cases(NUM_CASES, seed=7))
    faults: list[str] = []
    statuses: dict[int, int] = {}

    async def work(session: aiohttp.ClientSession) -> None:
        while waiting:
            route, body, kind = waiting.pop()
            headers = {"authorization": f"Bearer {seat.key}", "content-type": kind}
            try:
                async with session.post(
                    f"{seat.base_url}/v1/{route}", data=body, headers=headers
                ) as reply:
                    text = await reply.text()
            except (TimeoutError, aiohttp.ClientError) as error:
                faults.append(f"{route} {error!r}: {body[:400]!r}")
                continue
            statuses[reply.status] = statuses.get(reply.status, 0) + 1
            if fault := fault_in(route, reply.status, text):
                faults.append(f"{fault}\n  {route} {body[:1500]!r}\n  {reply.status} {text[:300]}")

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(work(session) for _ in range(8)))
    assert not faults, f"{len(faults)} of {NUM_CASES}, {statuses}\n" + "\n".join(faults[:8])
    assert statuses[200] > NUM_CASES / 4  # most are still requests
    assert statuses[400] > NUM_CASES / 20


def fault_in(route: str, status: int, text: str) -> str:
    if status >= 500:
        return "a 5xx of our making"
    if status == 200:
        return ""
    try:
        body = json.loads(text)
        error = body["error"]
    except (ValueError, KeyError, TypeError):
        return "no error body"
    is_anthropic = route.startswith("messages")
    if (body.get("type") == "error") != is_anthropic or not error.get("message"):
        return "not the dialect's shape"
    return "" if is_anthropic == ("code" not in error) else "not the dialect's fields"


@pytest.mark.parametrize(
    "body",
    [b"", b"x" * (20 << 20), b'{"a":' * 20000, b"\xff" * 100, b'{"messages":"' + b"y" * (20 << 20)],
    ids=["empty", "20 MB", "deep", "no text", "20 MB string"],
)
@pytest.mark.parametrize("route", ["chat/completions", "responses", "messages", "completions"])
def test_bodies_that_are_nothing_are_refused(stack: Stack, route: str, body: bytes) -> None:
    seat = Seat(stack)
    headers = {"x-api-key": seat.key}
    reply = httpx.post(f"{seat.base_url}/v1/{route}", content=body, headers=headers, timeout=60)
    assert reply.status_code == 400
    assert fault_in(route, reply.status_code, reply.text) == ""


def test_a_slow_sender_with_split_headers_is_answered(stack: Stack) -> None:
    seat = Seat(stack)
    address = urlsplit(seat.base_url)
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}'
    text = (
        f"POST {address.path}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Api-Key: {seat.key}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode() + body
    with socket.create_connection((str(address.hostname), address.port or 80)) as link:
        for start in range(0, len(text), 40):
            link.sendall(text[start : start + 40])
            time.sleep(0.02)
        reply = b"".join(iter(lambda: link.recv(65536), b""))
    assert reply.startswith(b"HTTP/1.1 200")


def test_a_key_opens_its_own_model_calls_and_no_other_door(stack: Stack) -> None:
    mine, other = Seat(stack), Seat(stack)
    engine, gateway = stack.parts.engine_urls[0], stack.parts.base_url
    dashboard = "http://" + ray._private.worker._global_node.address_info["webui_url"]  # type: ignore[attr-defined]
    doors = [
        *(f"{engine}{path}" for path in ("/v1/models", "/health", "/sleep", "/wake_up", "/metrics",
                                         "/delivered", "/update_weights", "/pause", "/docs")),
        *(f"{gateway}/rollout/{mine.rollout.rollout_id}/attempt/{n}/v1/models" for n in (1, 2)),
        f"{other.base_url}/v1/models",
        *(f"{gateway}{path}" for path in ("/rewards", "/events", "/store", "/outcome", "/rollout",
                                          "/rollout/../admin", "/rollout/x/reward")),
        *(f"{mine.base_url}{path}" for path in ("/reward", "/events", "/v1/rewards", "/outcome",
                                                "/../../../store", "/v1/../../../health/x")),
        f"{dashboard}/api/jobs/", f"{dashboard}/nodes?view=summary",
        f"{dashboard}/api/v0/actors",
    ]  # fmt: skip
    for url in doors:
        for method in ("GET", "POST"):
            for header in ({"authorization": f"Bearer {mine.key}"}, {"x-api-key": mine.key}):
                reply = httpx.request(method, url, headers=header, json={}, timeout=30)
                assert reply.status_code in (400, 401, 403, 404, 405), (method, url, reply.text)


def test_secrets_stay_out_of_logs_and_records(stack: Stack) -> None:
    seat = Seat(stack)
    seat.openai.completions.create(model="x", prompt="hello", max_tokens=1)
    folder = stack.config.run_dir
    logs = [*folder.rglob("*"), *_ray_logs()]
    secrets = [seat.key.encode(), stack.parts.secret.encode()]
    for path in logs:
        if path.is_file() and path.stat().st_size < 50 << 20:
            found: Any = path.read_bytes()
            assert not any(secret in found for secret in secrets), path


def _ray_logs() -> list[Any]:
    from pathlib import Path

    session = ray._private.worker._global_node.get_session_dir_path()  # type: ignore[attr-defined]
    return [*Path(session, "logs").rglob("*")]
