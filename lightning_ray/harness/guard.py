"""The fork server and the guard: they start a harness so that its whole tree dies with its runner.

    runner --control socket--> fork server --fork--> guard --fork--> harness --> what it starts
       '----------- life pipe, held open by the runner alone --------^

The fork server has the recipe's modules imported, so a Python harness begins in milliseconds. The
guard is the subreaper of its harness's tree: whatever the harness starts, even in a session of its
own, ends up below it. It kills that tree when the harness ends or when the life pipe does, which
happens however the runner ends, SIGKILL included.

Standard library only, and run as a script: `python guard.py CONTROL_FD FOLDER [MODULE ...]`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil  # noqa: F401  # which runpy imports when it is called: 4 ms in each fork
import resource
import runpy
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypedDict

GRACE_S = 0.5
"""Between SIGTERM and SIGKILL."""
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Request(TypedDict):
    """What a runner asks for: the content of the file whose path it sends with two descriptors."""

    argv: list[str]
    env: dict[str, str]
    workdir: str
    stdout: str
    stderr: str
    is_preloaded: bool
    """Run `python script ...` or `python -m module ...` in a fork of the server, without exec."""
    limits: dict[str, int]
    """Of `resource.setrlimit`, by name."""


def main() -> None:
    """Import the modules named on the command line, then start a guard for each request."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    del sys.path[0]  # this file's folder; a harness must not import from it
    for module in sys.argv[3:]:
        importlib.import_module(module)
    sys.stdout.flush()  # or each fork would write again what an import has printed
    gc.collect()
    gc.freeze()  # or the first collection in each fork would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # guards are reaped by the kernel
    control.send(b"ready")
    for path, life_r, status_w in _requests(control):
        _start_guard(path, life_r, status_w, control=control)
    with contextlib.suppress(ChildProcessError):
        os.wait()  # SIGCHLD being ignored, this returns when every guard has ended
    shutil.rmtree(sys.argv[2], ignore_errors=True)


def _requests(control: socket.socket) -> Iterator[tuple[str, int, int]]:
    while True:
        path, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
        if not path:
            return
        for descriptor in descriptors:  # recv_fds of 3.11 drops MSG_CMSG_CLOEXEC
            os.set_inheritable(descriptor, False)
        life_r, status_w = descriptors
        yield path.decode(), life_r, status_w
        os.close(life_r)
        os.close(status_w)


def _start_guard(path: str, life_r: int, status_w: int, *, control: socket.socket) -> None:
    try:
        is_guard = os.fork() == 0
    except OSError as error:
        _tell(status_w, f"error {error}")
        return
    if is_guard:
        try:
            control.close()
            _guard(path, life_r, status_w)
        finally:
            os._exit(70)  # never back into the server's loop


def _guard(path: str, life_r: int, status_w: int) -> NoReturn:
    request: Request = json.loads(Path(path).read_bytes())
    os.setsid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    harness = os.fork()
    if harness == 0:
        os.close(life_r)
        _become(request, status_w)
    status = _watch(harness, life_r)
    _kill_tree()
    ending = "killed" if status is None else f"exit {os.waitstatus_to_exitcode(status)}"
    if not _tell(status_w, ending):  # the runner is gone, and with it who would tidy up
        shutil.rmtree(Path(path).parents[1], ignore_errors=True)
    os.close(status_w)  # the kernel would take the memory apart first
    os._exit(0)


def _watch(harness: int, life_r: int) -> int | None:
    """Wait status of the harness, or None when the runner hung up first."""
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        status = (_reap() or {}).get(harness)
        if status is not None:
            return status
        ready, _, _ = select.select([life_r, wake_r], [], [])
        if life_r in ready:
            return None
        os.read(wake_r, 4096)


def _kill_tree() -> None:
    """End every descendant and reap it; returns when there is none."""
    deadline = time.monotonic() + GRACE_S
    number: signal.Signals | None = signal.SIGTERM
    while _reap() is not None:
        if number:
            _signal_all(number)
        # SIGTERM once; SIGKILL again and again, since one may have forked meanwhile
        number = signal.SIGKILL if time.monotonic() > deadline else None
        time.sleep(0.005)


def _reap() -> dict[int, int] | None:
    """Wait status by process id of the children that have ended; None when no child is left."""
    ended: dict[int, int] = {}
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return ended
            ended[pid] = status
    except ChildProcessError:
        return ended or None


def _signal_all(number: signal.Signals) -> None:
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(root: int) -> list[int]:
    """Process ids below `root`; /proc is walked because setsid escapes process groups."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
                parent = int(stat.rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found = list(children.get(root, []))
    for pid in found:
        found.extend(children.get(pid, []))
    return found


def _become(request: Request, status_w: int) -> NoReturn:
    """Turn this process into the harness."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # should the guard itself be killed
    argv = request["argv"]
    try:
        _redirect(request)
        if not request["is_preloaded"]:
            for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(argv[0], argv, request["env"])
        if argv[1] != "-m":
            Path(argv[1]).open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a NUL in an argument
        _tell(status_w, f"error {error}")
        os._exit(127)
    os.close(status_w)
    _run_python(argv[1:], env=request["env"])


def _redirect(request: Request) -> None:
    for name, limit in request["limits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))
    os.chdir(request["workdir"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for number, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["stdout"], flags),
        (2, request["stderr"], flags),
    ):
        descriptor = os.open(path, mode, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _run_python(argv: list[str], *, env: dict[str, str]) -> NoReturn:
    """Run `script ...` or `-m module ...` and leave as the interpreter would.

    Not the interpreter's own way out: taking every imported module apart costs more than the rest.
    """
    _refresh(env)
    code = _exit_code(argv)
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _refresh(env: dict[str, str]) -> None:
    """What a new interpreter reads from its surroundings, and the server read too early."""
    os.environ.clear()
    os.environ.update(env)
    time.tzset()
    if tempfile := sys.modules.get("tempfile"):
        tempfile.tempdir = None  # type: ignore[attr-defined]
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed()  # `random` does it by itself after a fork
    for path in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(0, path)


def _exit_code(argv: list[str]) -> int:
    sys.orig_argv = [sys.executable, *argv]
    try:
        if argv[0] == "-m":
            sys.argv = argv[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            sys.path.insert(0, os.path.dirname(os.path.realpath(argv[0])))
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as stop:
        return _code_of(stop)
    except BaseException as error:  # noqa: BLE001  # as the interpreter does
        trace = _from_program(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 1
    return 0


def _code_of(stop: SystemExit) -> int:
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    sys.stderr.write(f"{stop.code}\n")
    return 1


def _from_program(traceback: TracebackType | None) -> TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while traceback and traceback.tb_frame.f_code.co_filename in ours:
        traceback = traceback.tb_next
    return traceback


def _tell(status_w: int, text: str) -> bool:
    """Whether the runner can still be told."""
    try:
        os.write(status_w, f"{text}\n".encode())
    except BrokenPipeError:
        return False
    return True


def _prctl(option: int, value: int) -> None:
    _LIBC.prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
