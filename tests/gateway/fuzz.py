"""Requests that are almost what harnesses send: captured bodies, cut short and then damaged."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIRE = Path(__file__).parent.parent / "wire"
JUNK: list[Any] = [
    None, True, 0, -1, 1.5, 1e308, 2**70, "", "x", "é\u0000\ud83d\ude00", [], {}, [[]], [None],
    {"type": "alien"}, [{"type": "text"}], {"role": "user"}, "system", "auto", [{}] * 3,
]  # fmt: skip
LIMITS = {
    "messages": "max_tokens", "responses": "max_output_tokens", "chat/completions": "max_tokens",
}  # fmt: skip
DIALECTS = {"messages": "messages", "responses": "responses", "completions": "chat/completions"}


def cases(number: int, *, seed: int = 0) -> Iterator[tuple[str, bytes, str]]:
    """So many (route, body, content type); the same for the same seed."""
    random_ = random.Random(seed)
    bodies = list(_small_bodies())
    for _ in range(number):
        route, body = random_.choice(bodies)
        body = copy.deepcopy(body)
        for _ in range(random_.choice([0, 1, 1, 2, 3])):
            _damage(body, random_)
        raw = json.dumps(body).encode()
        if random_.random() < 0.1:
            raw = _break(raw, random_)
        kinds = ["application/json"] * 8 + ["text/plain", "", "multipart/form-data; boundary=x"]
        yield route, raw, random_.choice(kinds)


def _small_bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(WIRE.glob("*.json")):
        for route, body in bodies_in(path):
            yield route, _shortened(body) | {LIMITS[route]: 3}
    yield "completions", {"prompt": "hello", "max_tokens": 3}
    yield "messages/count_tokens", {"messages": [{"role": "user", "content": "hello"}]}


def bodies_in(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The (route, body) pairs of a capture; tools that it names by reference are put in."""
    tools: Any = []
    for exchange in json.loads(path.read_text())["exchanges"]:
        request = exchange["request"]
        name = request.get("path", "").rpartition("/")[2]
        if name in DIALECTS and isinstance(request.get("body"), dict):
            body = request["body"]
            tools = body["tools"] if isinstance(body.get("tools"), list) else tools
            yield DIALECTS[name], body | ({"tools": tools} if "tools" in body else {})


def _shortened(value: Any) -> Any:
    """The same structure with little text and few tools, so that a prompt is short."""
    if isinstance(value, str):
        return value[:30]
    if isinstance(value, list):
        return [_shortened(item) for item in (value[:1] + value[-2:] if len(value) > 3 else value)]
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in list(value.items())[:12]}
    return value


def _damage(body: dict[str, Any], random_: random.Random) -> None:
    """Change one place somewhere inside."""
    node: Any = body
    while True:
        places = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not places:
            return
        key = random_.choice(places)
        inner = node[key]
        if isinstance(inner, dict | list) and inner and random_.random() < 0.75:
            node = inner
            continue
        act = random_.random()
        if act < 0.3:
            del node[key]
        elif act < 0.9:
            node[key] = random_.choice(JUNK)
        else:
            node[key] = [copy.deepcopy(inner)] * 2
        return


def _break(raw: bytes, random_: random.Random) -> bytes:
    cut = random_.randrange(len(raw))
    return random_.choice(
        [raw[:cut], b"", raw[:cut] + b"\xff\xfe" + raw[cut:], b"[" * 5000, raw + raw, b"\x00" + raw]
    )
