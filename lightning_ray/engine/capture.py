"""Captures tokens where they are made: at `generate`, through which every dialect passes.

`CapturingLLM` is what vLLM's own server app talks to. `capture_app` wraps that app for the gateway:
it admits only callers that know the run's secret, and sends the capture behind the reply.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from lightning_ray import wire

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass
class _Exchange:
    """One HTTP request in the engine: the sampling it must use, and what was sampled."""

    sampling: wire.Sampling
    captures: list[wire.Capture] = field(default_factory=list)


_exchange: ContextVar[_Exchange | None] = ContextVar("exchange", default=None)


class CapturingLLM(AsyncLLM):
    """vLLM's engine client; what passes through `generate` inside an exchange is captured."""

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """As the parent's; the caller's reply is unchanged by the capture."""
        exchange = _exchange.get()
        if exchange is None:
            async for output in super().generate(prompt, sampling_params, request_id, **options):
                yield output
            return
        room = self.model_config.max_model_len - len(prompt.get("prompt_token_ids", ()))
        params = _with_sampling(sampling_params, exchange.sampling, room)
        taps: dict[int, _Tap] = {}
        prompt_ids: list[int] = []
        version = int(await self.get_weight_version())
        try:
            async for output in super().generate(prompt, params, request_id, **options):
                prompt_ids = output.prompt_token_ids or prompt_ids
                for completion in output.outputs:
                    taps.setdefault(completion.index, _Tap()).add(completion, params.output_kind)
                    if sampling_params.logprobs is None:
                        completion.logprobs = None
                yield output
        finally:
            exchange.captures += [tap.capture(prompt_ids, version) for tap in taps.values()]


def capture_app(app: App, *, secret: str) -> App:
    """The app behind the run's secret; every reply is framed, its captures in the last frame."""

    async def guarded(scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        headers = {key.decode(): value.decode("latin-1") for key, value in scope["headers"]}
        if not hmac.compare_digest(headers.get(wire.SECRET_HEADER, ""), secret):
            await send({"type": "http.response.start", "status": 403, "headers": []})
            return await send({"type": "http.response.body", "body": b"engines answer the gateway"})
        sampling = msgspec.json.decode(headers.get(wire.SAMPLING_HEADER, "{}"), type=wire.Sampling)
        exchange = _Exchange(sampling)
        token = _exchange.set(exchange)
        try:
            await app(scope, receive, _framed(send, exchange))
        finally:
            _exchange.reset(token)

    return guarded


def _framed(send: Any, exchange: _Exchange) -> Callable[[Message], Awaitable[None]]:
    async def framed(message: Message) -> None:
        if message["type"] == "http.response.start":
            head = {
                "status": message["status"],
                "headers": [
                    [key.decode("latin-1"), value.decode("latin-1")]
                    for key, value in message["headers"]
                ],
            }
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


def _with_sampling(asked: SamplingParams, sampling: wire.Sampling, room: int) -> SamplingParams:
    """The rollout's sampling, with log-probs, inside the context that is left."""
    params = asked.clone()
    params.logprobs = max(asked.logprobs or 0, 0)
    limit = sampling.max_tokens if sampling.max_tokens is not None else asked.max_tokens
    params.max_tokens = max(1, min(room, limit or room))
    if sampling.temperature is not None:
        params.n, params.seed, params.min_p = 1, None, 0.0
        params.presence_penalty = params.frequency_penalty = 0.0
        params.repetition_penalty = 1.0
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

    def capture(self, prompt_ids: list[int], version: int) -> wire.Capture:
        versions = np.full(len(self.ids), version, np.int32)
        for name, start, end in self.spans:
            versions[start:end] = int(name)
        return wire.Capture(
            prompt_ids=np.asarray(prompt_ids, np.int32).tobytes(),
            sampled_ids=np.asarray(self.ids, np.int32).tobytes(),
            logprobs=np.asarray(self.logprobs, np.float32).tobytes(),
            versions=versions.tobytes(),
            finish_reason=self.finish_reason or "abort",
        )
