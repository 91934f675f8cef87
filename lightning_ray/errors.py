"""What can go wrong, and whose part it was.

LightningError                 base; `rollout_id` when one rollout is concerned
├─ ConfigError (ValueError)    a setting is wrong; says which, and what would do
├─ HarnessError                the program did not start, failed, or ran out of time
├─ EngineError                 a model call failed; `status` is what the harness is shown
├─ RecordError                 a record could not be written or read
└─ WeightsError                weights could not be gathered, moved or loaded
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LightningError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, message: str, *, rollout_id: str | None = None) -> None:
        super().__init__(message)
        self.rollout_id = rollout_id

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), str(self), self.__dict__))


class ConfigError(LightningError, ValueError):
    """A setting is wrong; the message says which, and what would do."""


class HarnessError(LightningError):
    """A harness did not start, failed, or ran out of time."""


class EngineError(LightningError):
    """A model call failed; `status` is the HTTP status the harness is shown."""

    def __init__(self, message: str, *, rollout_id: str | None = None, status: int = 503) -> None:
        super().__init__(message, rollout_id=rollout_id)
        self.status = status


class RecordError(LightningError):
    """A record could not be written or read."""


class WeightsError(LightningError):
    """Weights could not be gathered, moved or loaded."""


@contextmanager
def boundary(
    kind: type[LightningError],
    doing: str,
    *catching: type[Exception],
    rollout_id: str | None = None,
) -> Iterator[None]:
    """Turn `catching` (default OSError) into `kind`, keeping the cause; our own errors pass."""
    try:
        yield
    except LightningError:
        raise
    except catching or (OSError,) as error:  # noqa: B030  a tuple of classes, by its type
        raise kind(f"{doing}: {type(error).__name__}: {error}", rollout_id=rollout_id) from error


def _rebuild(kind: type[LightningError], message: str, state: dict[str, object]) -> LightningError:
    error = kind(message)
    error.__dict__.update(state)
    return error
