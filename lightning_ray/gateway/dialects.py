"""What differs between the wire formats: the shape of an error, and the fields of ours in a body.

vLLM's own routes speak the protocols; nothing of them is implemented here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from lightning_ray import wire

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_SAMPLING_FIELDS = {
    "temperature", "top_p", "top_k", "min_p", "n", "best_of", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dialect:
    """One wire format."""

    name: str
    path: str
    """Below `/v1/`."""
    limit_fields: tuple[str, ...]
    """Where a body says how many tokens it wants, the one that counts first."""
    samples: bool = True
    """Whether a call samples from the policy, and so is recorded."""

    def prepare(
        self, body: bytes, *, served_name: str, sampling: wire.Sampling
    ) -> tuple[bytes, wire.Sampling]:
        """The body for vLLM's route and the sampling for the engine; ValueError says what is wrong.

        Any model name is mapped to the policy. The limit travels beside the body, since vLLM
        refuses one that exceeds the context, and harnesses ask for more than small models have.
        """
        try:
            fields = msgspec.json.decode(body, type=dict[str, Any])
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"the body must be a JSON object: {error}") from error
        fields["model"] = served_name
        if sampling.temperature is not None:  # the rollout decides; a clash must not become a 400
            fields = {name: value for name, value in fields.items() if name not in _SAMPLING_FIELDS}
        asked = [fields.pop(field) for field in self.limit_fields if fields.get(field) is not None]
        if asked and not (isinstance(asked[0], int) and asked[0] > 0):
            raise ValueError(
                f"`{self.limit_fields[0]}` must be a positive integer; got {asked[0]!r}"
            )
        if self.limit_fields:
            fields[self.limit_fields[-1]] = 1
        limits = [n for n in (*asked[:1], sampling.max_tokens) if n is not None]
        limited = msgspec.structs.replace(sampling, max_tokens=min(limits, default=None))
        return msgspec.json.encode(fields), limited

    def error(self, status: int, message: str, *, code: str | None = None) -> bytes:
        """An error body as this dialect's SDKs expect it."""
        kind = _ERROR_TYPES.get(status, "api_error")
        if self.name == "messages":
            return msgspec.json.encode(
                {"type": "error", "error": {"type": kind, "message": message}}
            )
        return msgspec.json.encode(
            {"error": {"message": message, "type": kind, "param": None, "code": code or kind}}
        )


DIALECTS = {
    dialect.path: dialect
    for dialect in (
        Dialect("chat", "chat/completions", ("max_completion_tokens", "max_tokens")),
        Dialect("completions", "completions", ("max_tokens",)),
        Dialect("responses", "responses", ("max_output_tokens",)),
        Dialect("messages", "messages", ("max_tokens",)),
        Dialect("messages", "messages/count_tokens", (), samples=False),
        Dialect("models", "models", (), samples=False),
    )
}
