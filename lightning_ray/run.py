"""Starts the parts of a run, wires them, and takes them down again."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from lightning_ray.collect import Collector, load_tasks
from lightning_ray.config import Config, load_function
from lightning_ray.engine.actor import answers, start_engines
from lightning_ray.errors import ConfigError
from lightning_ray.gateway.deploy import (
    serve_environment,
    start_gateway,
    stop_gateway,
    stop_haproxy,
)
from lightning_ray.gateway.gate import Gate
from lightning_ray.harness.recipe import load_recipe
from lightning_ray.harness.runner import start_runners
from lightning_ray.placement import Trainer, engine_share, make_group
from lightning_ray.store import Store

log = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


@dataclass
class Parts:
    """What a started run consists of."""

    base_url: str
    secret: str
    gate: Any
    store: Any
    engines: list[Any]
    engine_urls: list[str] = field(default_factory=list)
    runners: list[Any] = field(default_factory=list)
    collector: Any = None
    trainer: Any = None
    fitted: Any = None
    """Ready when training has ended; raises what ended it."""


@contextlib.contextmanager
def started(
    config: Config,
    *,
    say: Callable[[str], None],
    loop: Callable[[dict[str, Any]], Any] | None = None,
) -> Iterator[Parts]:
    """The parts of a run, up to the gateway answering; all are gone when the block ends.

    say:  told in a few words what is being started.
    loop: run by every train worker; they are started while the engines load their model.
    """
    _check(config)
    _prepare_folder(config)
    is_local = not os.environ.get("RAY_ADDRESS")
    parts: Parts | None = None
    with tempfile.TemporaryDirectory(prefix="lr-") as scratch:
        os.environ.update(serve_environment(config, scratch))
        _init(config, is_local=is_local)
        try:
            parts = _start(config, say, loop)
            yield parts
        finally:
            _close(parts)
            if not is_local:
                with contextlib.suppress(ray.exceptions.RayError):
                    stop_gateway()
            ray.shutdown()  # on this machine it ends Serve, and every process of the run, too
            stop_haproxy(scratch)


def _check(config: Config) -> None:
    """Everything that can be known to be wrong before anything is started."""
    folder = Path(config.model.path)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"model.path must be a Hugging Face model folder; `{folder}` has no config.json"
        )
    for name in config.track:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"track: {name} is not installed; `pip install {name}`, or leave it out"
            )
    if config.harness is not None:
        load_recipe(config.harness.recipe, root=os.getcwd())
        for spec in (config.harness.grader, config.train.credit):
            if spec is not None:
                load_function(spec, root=os.getcwd())
    if config.tasks is not None:
        for spec in (config.tasks.train, config.tasks.validate_):
            load_tasks(spec, root=os.getcwd())


def _prepare_folder(config: Config) -> None:
    """A fresh run folder; an earlier run of that name is kept beside it."""
    if config.run_dir.exists():
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(config.run_dir.stat().st_mtime))
        shutil.move(config.run_dir, config.run_dir.with_name(f"{config.name}.{stamp}"))
    config.run_dir.mkdir(parents=True)
    text = json.dumps(config.model_dump(mode="json", by_alias=True), indent=2)
    (config.run_dir / "config.json").write_text(text + "\n")


def _init(config: Config, *, is_local: bool) -> None:
    """Ray on this machine, or the cluster that RAY_ADDRESS names."""
    environment = {
        "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    }
    namespace = f"lr-{config.name}"
    runtime_env = {"env_vars": environment}
    if not is_local:
        ray.init(namespace=namespace, runtime_env=runtime_env, log_to_driver=False)
        return
    # a CPU for each bundle, one for the gateway and whoever takes part of one, one for Ray Data
    num_cpus = max(os.cpu_count() or 1, config.engine.count, config.train.num_workers or 1) + 2
    ray.init(
        address="local", namespace=namespace, runtime_env=runtime_env, log_to_driver=False,
        num_cpus=num_cpus, _node_ip_address="127.0.0.1", logging_level=logging.ERROR,
    )  # fmt: skip


def _start(
    config: Config, say: Callable[[str], None], loop: Callable[[dict[str, Any]], Any] | None
) -> Parts:
    namespace = ray.get_runtime_context().namespace
    secret = secrets.token_urlsafe(32)
    gate = ray.remote(num_cpus=0, max_concurrency=1000)(Gate).options(name="gate").remote()
    store = ray.remote(num_cpus=0, max_concurrency=10000)(Store).options(name="store").remote(
        str(config.run_dir / "store")
    )  # fmt: skip
    say(f"starting {config.engine.count} engine(s) on {config.model.path}")
    engines = start_engines(
        config, group=make_group(config), secret=secret, share=engine_share(config)
    )
    loading = [engine.start.remote() for engine in engines]
    parts = Parts("", secret, gate, store, engines)
    try:
        if loop is not None:
            parts.trainer = ray.remote(num_cpus=0)(Trainer).options(name="trainer").remote()
            parts.fitted = parts.trainer.fit.remote(config, loop, root=os.getcwd())
        if config.harness is not None:
            parts.runners = start_runners(
                config.harness, model=config.model.served_name, root=os.getcwd()
            )
        parts.engine_urls = answers(loading, "start", timeout_s=config.engine.start_timeout_s)
        say("starting the gateway")
        parts.base_url = start_gateway(
            config, engine_urls=parts.engine_urls, secret=secret, namespace=namespace
        )
        if config.tasks is not None:
            parts.collector = ray.remote(num_cpus=0, max_concurrency=1000)(Collector).options(
                name="collector"
            ).remote(config, root=os.getcwd(), runners=parts.runners, store=store,
                     base_url=parts.base_url, secret=secret)  # fmt: skip
    except BaseException:
        _close(parts)
        raise
    return parts


def _close(parts: Parts | None) -> None:
    """Trainer and runners first, so that nothing calls any more; then the store is sealed."""
    if parts is None:
        return
    if parts.trainer is not None:
        ray.kill(parts.trainer)
    closing = [runner.close.remote() for runner in parts.runners]
    _wait(closing)
    _wait([parts.store.close.remote()])
    for actor in (parts.collector, parts.gate, parts.store, *parts.runners, *parts.engines):
        if actor is not None:
            ray.kill(actor)


def _wait(refs: list[Any]) -> None:
    """Give the answers a moment; a part that is dead already needs no closing."""
    done, _ = ray.wait(refs, num_returns=len(refs), timeout=_CLOSE_TIMEOUT_S) if refs else ([], [])
    for ref in done:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(ref)
