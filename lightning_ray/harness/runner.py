"""The runner: an actor that runs harnesses, one process tree for each rollout, and grades them.

It owns the processes (through guard.py), their folders, their environment and their deadline. It
knows nothing of the calls they make. The recipe says what is run, the grader what it was worth.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from lightning_ray.config import HarnessConfig, load_function
from lightning_ray.errors import ConfigError, HarnessError, boundary
from lightning_ray.harness import guard
from lightning_ray.harness.recipe import Recipe, is_constant, load_recipe, search_path, substitute
from lightning_ray.schema import OutcomeKind, Rollout

Grader = Callable[[dict[str, Any], Path, str], float | None]
PRELOAD_TIMEOUT_S = 300.0
KILL_TIMEOUT_S = 10.0
LIMITS = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 1 << 30}
_GRADED_BYTES = 1 << 20
_GRADED_KINDS = ("ok", "agent_failed", "context_overflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a harness ended, as far as its processes show."""

    kind: OutcomeKind
    exit_code: int | None = None
    """Minus the signal's number when one ended it; None when it did not end by itself."""
    stdout: str = ""
    """The last 20 lines, 4 kB at most."""
    stderr: str = ""
    reward: float | None = None
    """None: not graded, or the grader declined."""
    message: str = ""
    """Empty when ok; else what happened, for a reader."""
    queued_s: float = 0.0
    """Waiting for a slot."""
    running_s: float = 0.0
    """From the request to start it until its whole tree was gone."""


def start_runners(
    config: HarnessConfig, *, model: str = "policy", root: str | Path = "."
) -> list[Any]:
    """Actor handles of `config.runners` runners; raises ConfigError before any is started.

    model: the name a harness asks for.
    root:  the driver's working directory: recipe paths and the grader's module are looked up there.
    """
    import ray

    folder = str(Path(root).absolute())
    recipe = load_recipe(Path(folder, config.recipe), root=folder)
    load_function(config.grader, root=folder)
    # num_gpus=0 does not hide the GPUs from an actor, and the grader runs in it.
    env = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    actor = ray.remote(Runner).options(
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,  # a rollout is run again by whoever asked, as a new attempt
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": env},
    )
    return [
        actor.remote(config, recipe=recipe, model=model, root=folder) for _ in range(config.runners)
    ]


class Runner:
    """Runs up to `config.slots` harnesses at once; made an actor by `start_runners`."""

    def __init__(self, config: HarnessConfig, *, recipe: Recipe, model: str, root: str) -> None:
        self._config = config
        self._recipe = recipe
        self._constants = {"model": model, "root": root, "python": sys.executable}
        self._grader: Grader = load_function(config.grader, root=root)
        self._slots = asyncio.Semaphore(config.slots)
        self._folder = Path(tempfile.mkdtemp(prefix="lightning-ray-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._server = self._start_server()
        self._is_closed = False

    async def run(self, rollout: Rollout, base_url: str, api_key: str) -> RunResult:
        """How the harness did on the rollout's task; its processes and its folder are gone by then.

        base_url: of the gateway, for this attempt, without `/v1`.
        Raises ConfigError when the recipe does not fit the task or its preload fails. Cancelling it
        kills the process tree.
        """
        asked_at = time.monotonic()
        async with self._slots:
            started_at = time.monotonic()
            folder = Path(tempfile.mkdtemp(prefix="rollout-", dir=self._folder))
            task = json.loads(rollout.task.data_json)
            values = {"base_url": base_url, "api_key": api_key, "task": task}
            try:
                result = await self._run(folder, values)
            except HarnessError as error:
                result = RunResult(kind="infra", message=str(error))
            finally:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return replace(
            result,
            queued_s=started_at - asked_at,
            running_s=result.running_s or time.monotonic() - started_at,
        )

    async def close(self) -> None:
        """Kill every harness and the fork server; runs not ended yet end as `infra`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._server.kill()
        for _ in range(self._config.slots):
            await self._slots.acquire()
        await self._server.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _run(self, folder: Path, values: Mapping[str, object]) -> RunResult:
        if self._is_closed:
            raise HarnessError("the runner was closed before the harness could start")
        if self._server.is_dead:
            self._server = self._start_server()
        server = self._server
        await server.ready()
        with boundary(HarnessError, "preparing the harness"):
            request = _prepare(folder, recipe=self._recipe, values={**self._constants, **values})
        started_at = time.monotonic()
        code = await server.run(request, timeout_s=self._config.timeout_s)
        running_s = time.monotonic() - started_at
        result = self._ending(code, folder, running_s=running_s)
        return await self._graded(result, folder, values["task"])

    def _ending(self, code: int | None, folder: Path, *, running_s: float) -> RunResult:
        stderr = _tail(folder / "stderr")
        kind: OutcomeKind = "ok"
        message = ""
        if code is None:
            kind = "timeout"
            limit = self._config.timeout_s
            message = f"harness was still running after {limit:g} s (harness.timeout_s)"
        elif code:
            kind = self._recipe.exit_codes.get(code, "harness_crash")
            message = f"harness {_died_how(code)} after {running_s:.1f} s"
        return RunResult(
            kind=kind,
            exit_code=code,
            stdout=_tail(folder / "stdout"),
            stderr=stderr,
            message=f"{message}: {stderr}" if message and stderr else message,
            running_s=running_s,
        )

    async def _graded(self, result: RunResult, folder: Path, task: Any) -> RunResult:
        """With the grader's reward, or as `infra` when the grader failed."""
        if result.kind not in _GRADED_KINDS:
            return result
        stdout = _end_of(folder / "stdout", num_bytes=_GRADED_BYTES)
        grading = _in_thread(self._grader, task, folder / "workdir", stdout)
        await asyncio.wait({grading}, timeout=self._config.grader_timeout_s)
        try:
            return replace(result, reward=_reward(grading, self._config))
        except HarnessError as error:
            return replace(result, kind="infra", message=str(error))

    def _start_server(self) -> _ForkServer:
        home = self._folder / "home"
        home.mkdir(exist_ok=True)
        constants = {
            name: substitute(value, self._constants)
            for name, value in self._recipe.env.items()
            if is_constant(value)
        }
        preload = self._recipe.preload if self._recipe.is_preloaded else []
        return _ForkServer(preload, env=_scrubbed(home) | constants, folder=self._folder)


class _ForkServer:
    """The runner's end of one fork server (guard.py)."""

    def __init__(self, preload: list[str], *, env: dict[str, str], folder: Path) -> None:
        self._log = folder / "fork-server.log"
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        command = [sys.executable, guard.__file__, str(theirs.fileno()), str(folder), *preload]
        with theirs, self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ray ends the process group of a worker that exits
            )
        self._is_stopped = False
        self._ready: asyncio.Future[None]
        self._watching: asyncio.Future[None] | None = None

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    async def ready(self) -> None:
        """Return when the preload is imported; raises ConfigError when that failed."""
        if self._watching is None:
            self._ready = asyncio.get_running_loop().create_future()
            self._watching = asyncio.ensure_future(self._watch())
        with boundary(HarnessError, "importing the recipe's preload", TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._ready), PRELOAD_TIMEOUT_S)

    async def run(self, request: Path, *, timeout_s: float) -> int | None:
        """Exit code of the harness, its tree being gone; None when it ran out of time.

        Raises HarnessError when it could not be started or the fork server died.
        """
        assert self._watching is not None, "ready() comes first"
        life_r, life_w = os.pipe()
        status_r, status_w = os.pipe()
        ending = asyncio.ensure_future(_read_all(status_r))
        try:
            self._send(request, life_r, status_w)
            either: list[asyncio.Future[Any]] = [ending, self._watching]
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_in_time, is_orphan = ending.done(), self._watching.done()
        finally:
            os.close(life_w)  # which ends the tree, whatever brought us here
            await asyncio.wait({ending}, timeout=KILL_TIMEOUT_S)
            ending.cancel()
        if not ending.done():
            raise HarnessError(f"the harness was not gone {KILL_TIMEOUT_S:.0f} s after its end")
        if is_orphan and not is_in_time:
            who = "runner was closed" if self._is_stopped else "fork server died"
            raise HarnessError(f"the harness was killed because its {who}")
        return _exit_code(ending.result()) if is_in_time else None

    def kill(self) -> None:
        """End the server at once; its guards end their harnesses when the runner lets go."""
        self._is_stopped = True
        self._process.kill()

    async def close(self) -> None:
        """End the server and give up what the runner holds of it."""
        self.kill()
        if self._watching is None:
            self._process.wait()
            self._control.close()
        else:
            await self._watching

    def _send(self, request: Path, life_r: int, status_w: int) -> None:
        try:
            with boundary(HarnessError, "asking the fork server for a harness"):
                socket.send_fds(self._control, [bytes(request)], [life_r, status_w])
        finally:
            os.close(life_r)
            os.close(status_w)

    async def _watch(self) -> None:
        """Tell when the server is ready; return when it is dead."""
        loop = asyncio.get_running_loop()
        with self._control:
            if await loop.sock_recv(self._control, 16) == b"ready":
                self._ready.set_result(None)
                await loop.sock_recv(self._control, 16)
        code = await asyncio.to_thread(self._process.wait)
        if not self._ready.done():
            fault = f"its Python {_died_how(code)}: {_tail(self._log)}"
            kind = HarnessError if code < 0 else ConfigError
            self._ready.set_exception(kind(f"the recipe's preload was not imported; {fault}"))


def _prepare(folder: Path, *, recipe: Recipe, values: Mapping[str, object]) -> Path:
    """Path of the request to start the recipe's program in `folder`, whose files are written."""
    workdir, home, tmp = (folder / name for name in ("workdir", "home", "tmp"))
    for path in (workdir, home, tmp):
        path.mkdir()
    values = {**values, "workdir": str(workdir), "home": str(home)}
    for name, text in recipe.files.items():
        path = workdir / substitute(name, values)
        if not path.resolve().is_relative_to(folder):
            raise ConfigError(f"recipe file `{name}` must be below `{{workdir}}` or `{{home}}`")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(substitute(text, values, path=name))
    env = {name: substitute(value, values) for name, value in recipe.env.items()}
    request = guard.Request(
        argv=[substitute(word, values) for word in recipe.command],
        env={**_scrubbed(home), "TMPDIR": str(tmp), **_addresses(values), **env},
        workdir=str(workdir),
        stdout=str(folder / "stdout"),
        stderr=str(folder / "stderr"),
        is_preloaded=recipe.is_preloaded,
        limits=LIMITS,
    )
    path = folder / "request.json"
    path.write_text(json.dumps(request))
    return path


def _scrubbed(home: Path) -> dict[str, str]:
    """All that a harness inherits: no RAY_*, no secret, no GPU."""
    kept = {name: os.environ[name] for name in ("LANG", "TZ") if name in os.environ}
    return {
        "LANG": "C.UTF-8",
        **kept,
        "PATH": search_path(),
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _addresses(values: Mapping[str, object]) -> dict[str, str]:
    """Where the two usual SDKs look for their model."""
    base_url, api_key = str(values["base_url"]), str(values["api_key"])
    return {
        "OPENAI_BASE_URL": f"{base_url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": api_key,
    }


async def _read_all(descriptor: int) -> bytes:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        return await reader.read()
    finally:
        transport.close()


def _exit_code(ending: bytes) -> int:
    """From the guard's words: `exit CODE`, after `error TEXT` when there was no start."""
    for line in ending.decode(errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word == "error":
            raise HarnessError(f"harness could not be started: {rest}")
        if word == "exit":
            return int(rest)
    raise HarnessError("the harness's guard died")


def _died_how(code: int) -> str:
    if code > 0:
        return f"exited with status {code}"
    return f"was killed by {signal.Signals(-code).name}"


def _tail(path: Path, *, num_lines: int = 20, num_bytes: int = 4096) -> str:
    return "\n".join(_end_of(path, num_bytes=num_bytes).splitlines()[-num_lines:])


def _end_of(path: Path, *, num_bytes: int) -> str:
    """The last bytes of a file as text; empty when the harness has made something else of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            file.seek(max(0, os.fstat(descriptor).st_size - num_bytes))
            return file.read(num_bytes).decode(errors="replace")
    except OSError:
        return ""


def _in_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """The result of a call in a thread of its own, which may be abandoned.

    Not an executor: a stuck grader would use up its threads and hold up the process's exit.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  # a grader's fault becomes the run's message
            result.set_exception(error)

    threading.Thread(target=call, name="grader", daemon=True).start()
    return asyncio.wrap_future(result)


def _reward(grading: asyncio.Future[Any], config: HarnessConfig) -> float | None:
    """What the grader returned; raises HarnessError when it is at fault."""
    if not grading.done():
        grading.cancel()
        fault = f"did not end in {config.grader_timeout_s:g} s (harness.grader_timeout_s)"
    elif error := grading.exception():
        fault = f"failed with {type(error).__name__}: {error}"
    else:
        reward = grading.result()
        is_number = isinstance(reward, Real) and not isinstance(reward, bool)
        if reward is None or (is_number and math.isfinite(reward)):
            return None if reward is None else float(reward)
        fault = f"returned {reward!r}"
    raise HarnessError(f"grader `{config.grader}` {fault}; it must return a finite number or None")
