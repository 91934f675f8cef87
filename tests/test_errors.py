"""Errors keep their words and fields across processes."""

from __future__ import annotations

import pickle

import pytest

from lightning_ray import errors


@pytest.mark.parametrize(
    "kind",
    [errors.LightningError, errors.ConfigError, errors.HarnessError, errors.EngineError,
     errors.RecordError, errors.WeightsError],
)  # fmt: skip
def test_every_error_survives_pickling(kind: type[errors.LightningError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what, expected, found", rollout_id="r1")))
    assert (type(again), str(again), again.rollout_id) == (kind, "what, expected, found", "r1")


def test_an_engine_error_keeps_its_status() -> None:
    assert pickle.loads(pickle.dumps(errors.EngineError("busy", status=429))).status == 429


def test_a_boundary_names_the_act_and_keeps_the_cause() -> None:
    with (
        pytest.raises(errors.RecordError, match="writing: OSError: full") as caught,
        errors.boundary(errors.RecordError, "writing"),
    ):
        raise OSError("full")
    assert isinstance(caught.value.__cause__, OSError)
