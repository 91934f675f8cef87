"""Graders, good and bad, for the tests of the runner."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def reads(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    """1.0 when the harness left the task's answer in a file and on its standard output."""
    return float((workdir / "answer").read_text() == task["answer"] == stdout.strip())


def one(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    return 1.0


def declines(task: dict[str, Any], workdir: Path, stdout: str) -> None:
    return None


def gives(task: dict[str, Any], workdir: Path, stdout: str) -> Any:
    return {"nan": float("nan"), "inf": float("inf"), "bool": True, "text": "1.0"}[task["gives"]]


def fails(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    return task["missing"]  # type: ignore[no-any-return]


def leaves(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    sys.exit(0)


def hangs(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    time.sleep(2)
    return 1.0
