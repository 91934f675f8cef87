"""Six small jobs for a shell in a scratch git repository, and the check that grades each.

A task is `task_id`, `prompt`, `files` (path to text, the repository at the start) and `check` (a
shell script that exits 0 when the job is done; it is never shown to the agent).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

CHECK_TIMEOUT_S = 10.0
Task = dict[str, Any]


def train() -> list[Task]:
    """The tasks to learn from."""
    return [
        {
            "task_id": f"create-{name}",
            "prompt": f"Create the file {name} that holds the word {word}.",
            "files": {"README.md": "# scratch\n"},
            "check": f'test "$(cat {name})" = {word}',
        }
        for name, word in (("hello.txt", "hello"), ("color.txt", "blue"))
    ] + [
        {
            "task_id": "rename",
            "prompt": "Rename old.txt to new.txt.",
            "files": {"old.txt": "kept\n"},
            "check": 'test ! -e old.txt && test "$(cat new.txt)" = kept',
        },
        {
            "task_id": "fix-script",
            "prompt": "run.sh must print done, but it fails. Fix it.",
            "files": {"run.sh": "#!/bin/sh\nehco done\n"},
            "check": 'test "$(sh run.sh)" = done',
        },
    ]


def validate() -> list[Task]:
    """The tasks that are only measured."""
    return [
        {
            "task_id": "create-city.txt",
            "prompt": "Create the file city.txt that holds the word Oslo.",
            "files": {"README.md": "# scratch\n"},
            "check": 'test "$(cat city.txt)" = Oslo',
        },
        {
            "task_id": "delete",
            "prompt": "Delete the file trash.txt.",
            "files": {"trash.txt": "x\n", "keep.txt": "x\n"},
            "check": "test ! -e trash.txt && test -e keep.txt",
        },
    ]


def grade_partly(task: Task, workdir: Path, stdout: str) -> float:
    """As `grade`, and a little for an agent that fails but at least writes code.

    A model of SmolLM2's size does not solve these tasks, and without a difference in reward there
    is nothing to learn from.
    """
    if grade(task, workdir, stdout) == 1.0:
        return 1.0
    said = workdir.parent / "home" / "trajectory.json"  # mini's own record, by the recipe
    text = said.read_text() if said.is_file() else ""
    return 0.1 * min(text.count("```"), 4) / 4


def grade(task: Task, workdir: Path, stdout: str) -> float:
    """1.0 when the task's check passes in the folder the agent worked in, else 0.0.

    The check comes from the task, never from the folder. One that does not end in time has failed:
    it may run what the agent left there. Whatever it started is killed with it.
    """
    process = subprocess.Popen(
        ["/bin/sh", "-c", task["check"]],
        cwd=workdir,
        env={"PATH": os.defpath, "HOME": "/nonexistent"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return float(process.wait(CHECK_TIMEOUT_S) == 0)
    except subprocess.TimeoutExpired:
        return 0.0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
