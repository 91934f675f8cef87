"""Captures tokens where they are made: at `generate`, through which every dialect passes.

`CapturingLLM` is what vLLM's own server app talks to. `capture_app` wraps that app for the gateway:
it admits only callers that know the run's secret, and sends the capture behind the reply.
"""

from __future__ import annotations

import hmac
import uuid
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from lightning_ray import wire
from lightning_ray.engine.continuation import Turn
from lightning_ray.engine.flights import App, Flights, Message, Receive, Send, read_body
from lightning_ray.engine.sessions import Sessions


@dataclass
class _Exchange:
    """One HTTP request in the engine: the sampling it must use, and what was sampled."""

    call_key: str
    sampling: wire.Sampling
    exchange_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    captures: list[wire.Capture] = field(default_factory=list)


_PLAIN = SamplingParams()
_SHAPING = (
    "n", "seed", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words",
    "_bad_words_token_ids", "structured_outputs", "thinking_token_budget", "watermarking",
    "repetition_detection", "extra_args",
)  # fmt: skip
"""What would make tokens come from another distribution than the one that is trained."""
_exchange: ContextVar[_Exchange | None] = ContextVar("exchange", default=None)


class CapturingLLM(AsyncLLM):
    """vLLM's engine client; what passes through `generate` inside an exchange is captured."""

    sessions: Sessions | None = None
    """The earlier calls of the rollouts served here; None: prompts stay as they were rendered."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As the parent's; the caller's reply is unchanged by the capture."""
        exchange = _exchange.get()
        if exchange is None:
            async for output in super().generate(prompt, sampling_params, request_id, **options):
                yield output
            return
        limit = self.model_config.max_model_len
        prompt, passage = await self._continued(prompt, exchange.call_key, limit)
        room = limit - len(prompt.get("prompt_token_ids", ()))
        params = _with_sampling(sampling_params, exchange.sampling, room)
        taps: dict[int, _Tap] = {}
        version = int(await self.get_weight_version())
        try:
            async for output in super().generate(prompt, params, request_id, **options):
                passage.prompt_ids = output.prompt_token_ids or passage.prompt_ids
                for completion in output.outputs:
                    taps.setdefault(completion.index, _Tap()).add(completion, params.output_kind)
                    if sampling_params.logprobs is None:
                        completion.logprobs = None
                yield output
        finally:
            captures = [tap.capture(passage, version) for tap in taps.values()]
            exchange.captures += captures
            if self.sessions is not None:
                self.sessions.add(exchange.call_key, [_turn(capture) for capture in captures])

    async def _continued(
        self, prompt: Any, call_key: str, limit: int
    ) -> tuple[dict[str, Any], _Passage]:
        """The prompt from the tokens that were really sampled, where it re-renders them."""
        rendered = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
        if not rendered or self.sessions is None or prompt.get("type") == "multimodal":
            return prompt, _Passage(rendered or [])
        continued = await self.sessions.continued(call_key, np.asarray(rendered, np.int32), limit)
        prompt_ids = continued.prompt_ids.tolist()
        prompt = {**prompt, "prompt_token_ids": prompt_ids}
        return prompt, _Passage(prompt_ids, rendered, continued.reason)


@dataclass
class _Passage:
    """A prompt on its way into the engine."""

    prompt_ids: list[int]
    rendered_ids: list[int] | None = None
    joined: str = ""


def capture_app(app: App, *, secret: str, grace_s: float) -> tuple[App, Flights]:
    """The app behind the run's secret; every reply is framed, its captures in the last frame."""
    flights = Flights(_capturing(app), grace_s=grace_s, keep_s=10 * grace_s)

    async def guarded(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        headers = _headers(scope)
        if not hmac.compare_digest(headers.get(wire.SECRET_HEADER, ""), secret):
            return await _plain(send, 403, b"engines answer the gateway")
        if scope["path"] == wire.DELIVERED_PATH:
            flights.forget(msgspec.json.decode(await read_body(receive) or b"[]"))
            return await _plain(send, 200, b"")
        if key := headers.get(wire.CALL_HEADER):
            return await flights.join(key, scope, receive, send)
        await _capturing(app)(scope, receive, send)

    return guarded, flights


def _capturing(app: App) -> App:
    async def capturing(scope: Message, receive: Receive, send: Send) -> None:
        headers = _headers(scope)
        sampling = msgspec.json.decode(headers.get(wire.SAMPLING_HEADER, "{}"), type=wire.Sampling)
        exchange = _Exchange(headers.get(wire.CALL_HEADER, ""), sampling)
        token = _exchange.set(exchange)
        try:
            await app(scope, receive, _framed(send, exchange))
        finally:
            _exchange.reset(token)

    return capturing


def _headers(scope: Message) -> dict[str, str]:
    return {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}


async def _plain(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})


def _framed(send: Send, exchange: _Exchange) -> Send:
    async def framed(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in message["headers"]]
            head = wire.Head(message["status"], headers, exchange.exchange_id)
            content_type = (b"content-type", wire.MEDIA_TYPE.encode())
            await send({**message, "status": 200, "headers": [content_type]})
            body = wire.frame(wire.HEAD, msgspec.json.encode(head))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            framed_body = wire.frame(wire.BODY, body) if body else b""
            more = message.get("more_body", False)
            if not more:
                captures = wire.encode_captures(exchange.captures)
                framed_body += wire.frame(wire.CAPTURES, captures)
            await send({"type": "http.response.body", "body": framed_body, "more_body": more})

    return framed


def _turn(capture: wire.Capture) -> Turn:
    prompt_ids = wire.ids(capture.prompt_ids)
    rendered = wire.ids(capture.rendered_ids) if capture.rendered_ids else prompt_ids
    return Turn(rendered, prompt_ids, wire.ids(capture.sampled_ids))


def _with_sampling(asked: SamplingParams, sampling: wire.Sampling, room: int) -> SamplingParams:
    """The rollout's sampling, with log-probs, inside the context that is left."""
    params = asked.clone()
    params.logprobs = max(asked.logprobs or 0, 0)
    limit = sampling.max_tokens if sampling.max_tokens is not None else asked.max_tokens
    params.max_tokens = max(1, min(room, limit or room))
    if sampling.temperature is not None:
        for name in _SHAPING:
            setattr(params, name, getattr(_PLAIN, name))
        params.temperature = sampling.temperature
        params.top_p = sampling.top_p if sampling.top_p is not None else 1.0
        params.top_k = sampling.top_k if sampling.top_k is not None else 0
    params.min_tokens = min(params.min_tokens, params.max_tokens)
    return params


class _Tap:
    """Gathers one completion from vLLM's outputs, whole or in deltas."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[tuple[str, int, int]] = []
        self.finish_reason: str | None = None

    def add(self, completion: CompletionOutput, kind: RequestOutputKind) -> None:
        if kind == RequestOutputKind.CUMULATIVE:
            self.ids, self.logprobs = [], []
        token_ids = list(completion.token_ids)
        self.ids += token_ids
        for token_id, position in zip(token_ids, completion.logprobs or (), strict=True):
            self.logprobs.append(position[token_id].logprob)
        if completion.finish_reason is not None:
            self.finish_reason = completion.finish_reason
            self.spans = [(s.version, s.start, s.end) for s in completion.weight_versions or ()]

    def capture(self, passage: _Passage, version: int) -> wire.Capture:
        versions = np.full(len(self.ids), version, np.int32)
        for name, start, end in self.spans:
            versions[start:end] = int(name)
        is_changed = passage.rendered_ids not in (None, passage.prompt_ids)
        return wire.Capture(
            prompt_ids=np.asarray(passage.prompt_ids, np.int32).tobytes(),
            sampled_ids=np.asarray(self.ids, np.int32).tobytes(),
            logprobs=np.asarray(self.logprobs, np.float32).tobytes(),
            versions=versions.tobytes(),
            finish_reason=self.finish_reason or "abort",
            rendered_ids=np.asarray(passage.rendered_ids, np.int32).tobytes()
            if is_changed
            else b"",
            joined=passage.joined,
        )
