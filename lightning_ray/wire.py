"""What travels between engine, gateway and store: captures, and the frames that carry them.

An engine's reply to the gateway is a sequence of frames: one byte of kind, four of length (big
endian), the payload. `HEAD` comes first (status and headers as JSON), then `BODY` chunks as the
route sent them, then one `CAPTURES` (msgpack), which also marks a complete reply.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Iterator

import msgspec
import numpy as np

HEAD, BODY, CAPTURES = b"h", b"b", b"c"
SECRET_HEADER = "x-lr-secret"
SAMPLING_HEADER = "x-lr-sampling"
CALL_HEADER = "x-lr-call"
"""`rollout_id/attempt/digest`: the same for a request that is sent again."""
DELIVERED_PATH = "/delivered"
"""Where an engine is told which calls (a JSON list of keys) have reached their harness."""
MEDIA_TYPE = "application/x-lightning-ray-frames"
_PREFIX = struct.Struct(">cI")


class Capture(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one pass through `EngineClient.generate` saw and sampled; arrays as raw bytes."""

    prompt_ids: bytes
    """[P] int32"""
    sampled_ids: bytes
    """[S] int32"""
    logprobs: bytes
    """[S] float32"""
    versions: bytes
    """[S] int32"""
    finish_reason: str | None
    rendered_ids: bytes = b""
    """[N] int32, the prompt as the chat template rendered it; empty when that is `prompt_ids`."""
    joined: str = ""
    """How the prompt relates to earlier calls of its rollout (`engine.continuation.Reason`)."""


class Head(msgspec.Struct, frozen=True):
    """The first frame of a reply."""

    status: int
    headers: list[tuple[str, str]]
    exchange_id: str
    """Of the one run in the engine; the same for everyone who joined it."""


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampling a call must use, whatever the harness asked for; None leaves its wish."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None


def frame(kind: bytes, payload: bytes) -> bytes:
    """One frame, ready to send."""
    return _PREFIX.pack(kind, len(payload)) + payload


async def frames(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[bytes, bytes]]:
    """The (kind, payload) pairs in a stream cut anywhere; a torn last frame is left out."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        for item in _take(buffer):
            yield item


def encode_captures(captures: list[Capture]) -> bytes:
    """Msgpack of the captures of one exchange, in the order they were made."""
    return msgspec.msgpack.encode(captures)


def decode_captures(payload: bytes) -> list[Capture]:
    """The captures of one exchange."""
    return msgspec.msgpack.decode(payload, type=list[Capture])


def ids(raw: bytes) -> np.ndarray:
    """[N] int32 view of a capture's ids or versions."""
    return np.frombuffer(raw, np.int32)


def floats(raw: bytes) -> np.ndarray:
    """[N] float32 view of a capture's log-probs."""
    return np.frombuffer(raw, np.float32)


def _take(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Remove the whole frames at the front of the buffer."""
    while len(buffer) >= _PREFIX.size:
        kind, length = _PREFIX.unpack_from(buffer)
        end = _PREFIX.size + length
        if len(buffer) < end:
            return
        payload = bytes(buffer[_PREFIX.size : end])
        del buffer[:end]
        yield kind, payload
