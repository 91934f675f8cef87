"""The whole process tree is gone after every ending, and a fork is as good as an exec."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_ray.config import HarnessConfig
from lightning_ray.errors import ConfigError
from lightning_ray.harness.runner import start_runners
from tests.harness.processes import (
    BASE_URL,
    PROGRAMS,
    ROOT,
    are_gone,
    is_removed,
    is_running,
    parent_of,
    pids_in,
    rollout_of,
)

# Python that is forked with its imports done, and a program that is executed.
WAYS = {"forked": {"preload": ["json.tool"]}, "executed": {}}
ways = pytest.mark.parametrize("way", list(WAYS))


def command(program: str, *args: object) -> list[str]:
    return ["{python}", f"{PROGRAMS}/{program}.py", *map(str, args)]


@ways
async def test_tree_dies_when_the_run_is_cancelled(
    new_runner: Callable[..., Any], tmp_path: Path, way: str
) -> None:
    runner = new_runner(command=command("stubborn", "{task.pids}"), **WAYS[way])
    trees = []
    runs = []
    for name in ("first", "second"):
        rollout = rollout_of(pids=str(tmp_path / name))
        runs.append(asyncio.ensure_future(runner.run(rollout, BASE_URL, "key")))
        trees.append(await pids_in(tmp_path / name))
    runs[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await runs[0]
    assert not any(map(is_running, trees[0]))  # at once: cancelling waits for the tree
    assert all(
        map(is_running, trees[1])
    )  # the other rollout did not hold its pipe, nor die with it
    await runner.close()
    assert not any(map(is_running, trees[1]))
    assert (await runs[1]).message == "the harness was killed because its runner was closed"


async def test_tree_dies_at_the_deadline(run: Callable[..., Any], tmp_path: Path) -> None:
    program = f"trap '' TERM; sleep 600 & echo $$ $! > {tmp_path}/pids; wait"
    result = await run({"timeout_s": 1.5}, command=["sh", "-c", program])
    assert result.kind == "timeout"
    assert result.exit_code is None
    assert result.reward is None
    assert result.message == "harness was still running after 1.5 s (harness.timeout_s)"
    assert not any(map(is_running, await pids_in(tmp_path / "pids")))


async def test_tree_dies_with_the_fork_server_and_the_next_run_has_a_new_one(
    new_runner: Callable[..., Any], tmp_path: Path
) -> None:
    runner = new_runner(command=command("stubborn", "{task.pids}"), preload=["json"])
    rollout = rollout_of(pids=str(tmp_path / "pids"))
    running = asyncio.ensure_future(runner.run(rollout, BASE_URL, "key"))
    tree = await pids_in(tmp_path / "pids")
    os.kill(parent_of(parent_of(tree[0])), signal.SIGKILL)
    result = await running
    assert result.kind == "infra"
    assert result.message == "the harness was killed because its fork server died"
    assert not any(map(is_running, tree))

    running = asyncio.ensure_future(
        runner.run(rollout_of(pids=str(tmp_path / "again")), BASE_URL, "key")
    )
    assert all(map(is_running, await pids_in(tmp_path / "again")))
    running.cancel()


async def test_killed_guard_takes_the_harness_along(
    new_runner: Callable[..., Any], tmp_path: Path
) -> None:
    runner = new_runner(command=command("stubborn", tmp_path / "pids"))
    running = asyncio.ensure_future(runner.run(rollout_of(), BASE_URL, "key"))
    harness, child = await pids_in(tmp_path / "pids")
    os.kill(parent_of(harness), signal.SIGKILL)
    result = await running
    assert (result.kind, result.message) == ("infra", "the harness's guard died")
    assert await are_gone([harness])
    os.kill(child, signal.SIGKILL)  # nobody is left to do it


async def test_what_a_harness_leaves_behind_dies_with_it(
    run: Callable[..., Any], tmp_path: Path
) -> None:
    result = await run(command=command("leaves", tmp_path / "pids"), exit_codes={3: "ok"})
    assert (result.exit_code, result.reward) == (3, 1.0)
    assert not any(map(is_running, await pids_in(tmp_path / "pids")))


@pytest.mark.heavy
@pytest.mark.parametrize("ending", ["kill", "out of scope", "SIGKILL"])
async def test_tree_dies_with_its_actor(ray_cluster: Any, tmp_path: Path, ending: str) -> None:
    recipe = {"command": command("stubborn", tmp_path / "pids"), "preload": ["json"]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    # Ray lets an actor out of scope finish what it was asked for, so that ends at the deadline.
    config = HarnessConfig(
        recipe=str(tmp_path / "recipe.yaml"),
        grader="tests.harness.graders:one",
        timeout_s=3 if ending == "out of scope" else 60,
    )
    (runner,) = start_runners(config, root=ROOT)
    running = runner.run.remote(rollout_of(), BASE_URL, "key")
    tree = await pids_in(tmp_path / "pids")
    server = parent_of(parent_of(tree[0]))
    worker = parent_of(server)
    folder = Path(f"/proc/{tree[0]}/cwd").resolve().parent
    assert all(map(is_running, [*tree, server, worker]))
    if ending == "kill":
        ray_cluster.kill(runner)
    elif ending == "SIGKILL":
        os.kill(worker, signal.SIGKILL)
    del runner, running
    gc.collect()
    assert await are_gone([*tree, server, worker], within_s=20)
    assert await is_removed(folder.parent)


@pytest.mark.heavy
async def test_actor_tells_of_a_task_that_does_not_fit_its_recipe(
    ray_cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "recipe.yaml").write_text("command: [echo, '{task.question}']")
    config = HarnessConfig(
        recipe=str(tmp_path / "recipe.yaml"), grader="tests.harness.graders:one", slots=1
    )
    (runner,) = start_runners(config, root=ROOT)
    with pytest.raises(ConfigError, match=r"`\{task.question\}` is not known"):
        await runner.run.remote(rollout_of(prompt="?"), BASE_URL, "key")
    result = await runner.run.remote(rollout_of(question="!"), BASE_URL, "key")
    assert (result.kind, result.stdout) == ("ok", "!")
    await runner.close.remote()


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("how", ["0", "7", "300", "text", "raise", "signal", "thread"])
async def test_forked_program_ends_as_an_executed_one(run: Callable[..., Any], how: str) -> None:
    forked, executed = [
        await run(command=command("ends", how), **WAYS[way]) for way in ("forked", "executed")
    ]
    assert forked.exit_code == executed.exit_code
    assert forked.stdout == executed.stdout
    assert forked.stderr == executed.stderr
    assert forked.kind == executed.kind


@ways
async def test_program_finds_a_fresh_interpreter(run: Callable[..., Any], way: str) -> None:
    recipe = {
        "command": command("shows", "two words", "{task.text}"),
        "files": {"task.json": "{task}"},
        **WAYS[way],
    }
    first, second = [
        json.loads((await run(task={"text": "é\n'"}, **recipe)).stdout) for _ in range(2)
    ]
    program = f"{ROOT}/tests/harness/programs/shows.py"
    assert first["is_preloaded"] == (way == "forked")
    assert first["argv"] == [program, "two words", "é\n'"]
    assert first["name"] == "__main__"
    assert first["main"] == program
    assert first["path"][0] == str(Path(program).parent)
    assert f"{ROOT}/lightning_ray/harness" not in first["path"]
    assert first["files"] == ["task.json"]
    assert first["stdin"] == ""
    assert first["core"] == [0, 0]
    assert sorted(first["descriptors"]) == ["0", "1", "2"]
    assert first["cwd"] != second["cwd"]
    assert first["random"] != second["random"]


@ways
async def test_harness_inherits_nothing_but_what_it_needs(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    for name in ("RAY_AUTH_TOKEN", "OPENAI_API_KEY", "HF_TOKEN", "PYTHONPATH", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "of the runner")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    result = await run(
        command=command("shows"),
        env={"ANTHROPIC_API_KEY": "mine", "WHERE": "{workdir}"},
        **WAYS[way],
    )
    seen = json.loads(result.stdout)
    environ = seen["environ"]
    assert environ.pop("PATH").split(":")[0] == str(Path(sys.executable).parent)
    folder = str(Path(seen["cwd"]).parent)
    with contextlib.suppress(KeyError):
        del environ["TZ"]
    assert environ == {
        "HOME": f"{folder}/home",
        "TMPDIR": f"{folder}/tmp",
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OPENAI_BASE_URL": f"{BASE_URL}/v1",
        "OPENAI_API_KEY": "sk-rollout",
        "ANTHROPIC_BASE_URL": BASE_URL,
        "ANTHROPIC_API_KEY": "mine",
        "WHERE": f"{folder}/workdir",
    }
    assert (seen["home"], seen["tmp"]) == (environ["HOME"], environ["TMPDIR"])
    assert not Path(folder).exists()
