"""Keys scoped to one attempt of one rollout: signed, expiring, good for model calls only."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import hmac
import time

import msgspec

from lightning_ray.schema import Mode

_PREFIX = "sk-lr-"
_TAG_BYTES = 16


class Claims(msgspec.Struct, frozen=True, array_like=True):
    """What a key opens."""

    rollout_id: str
    attempt: int
    mode: Mode
    expires_at: float


class KeyRefused(Exception):
    """The key opens nothing; the message may be shown to whoever sent it."""


def sign(claims: Claims, *, secret: str) -> str:
    """The key for these claims; safe in headers, files and environment variables."""
    payload = msgspec.msgpack.encode(claims)
    return _PREFIX + base64.urlsafe_b64encode(_tag(payload, secret) + payload).decode().rstrip("=")


def verify(key: str, *, secret: str) -> Claims:
    """The claims of a key; KeyRefused when it is not ours, was altered, or has expired."""
    claims = _opened(key, secret)
    if claims.expires_at < time.time():
        raise KeyRefused("the key has expired with its attempt")
    return claims


@functools.lru_cache(4096)
def _opened(key: str, secret: str) -> Claims:
    text = key.removeprefix(_PREFIX)
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise KeyRefused("the key is not one of this gateway's") from None
    tag, payload = raw[:_TAG_BYTES], raw[_TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(payload, secret)):
        raise KeyRefused("the key is not one of this gateway's")
    return msgspec.msgpack.decode(payload, type=Claims)


def _tag(payload: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), payload, hashlib.sha256)[:_TAG_BYTES]
