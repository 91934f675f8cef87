"""How fast rollouts start, with the recipe's preload and without.

    python -m jobs.bench.launch [--slots 2] [--seconds 10]

A start is counted from the runner's request to the moment the program has its SDK and a client.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

import numpy as np

from lightning_ray.config import HarnessConfig
from lightning_ray.harness.recipe import Recipe, load_recipe
from lightning_ray.harness.runner import Runner
from lightning_ray.schema import Rollout, Task

ROOT = Path(__file__).parents[2]
BASE_URL = "http://127.0.0.1:9/rollout/bench/attempt/0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--slots", type=int, default=2, help="programs at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    args = parser.parse_args()
    shipped = load_recipe(ROOT / "configs/harness/calculator.yaml", root=ROOT)
    forked = shipped.model_copy(
        update={"command": ["{python}", "{root}/jobs/bench/started.py"], "files": {}}
    )
    for name, recipe in (
        ("preload", forked),
        ("no preload", forked.model_copy(update={"preload": []})),
    ):
        print(asyncio.run(measure(name, recipe, slots=args.slots, seconds=args.seconds)))


async def measure(name: str, recipe: Recipe, *, slots: int, seconds: float) -> str:
    """One line of results."""
    config = HarnessConfig(recipe="-", grader="jobs.bench.launch:grade", slots=slots)
    runner = Runner(config, recipe=recipe, model="policy", root=str(ROOT))
    await start(runner)  # the preload itself is not measured
    began_at, cpu_s = time.monotonic(), time.process_time()
    starts: list[tuple[float, float]] = []

    async def keep_starting() -> None:
        while time.monotonic() - began_at < seconds:
            starts.append(await start(runner))

    await asyncio.gather(*(keep_starting() for _ in range(slots)))
    wall_s = time.monotonic() - began_at
    runner_ms = (time.process_time() - cpu_s) / len(starts) * 1000
    await runner.close()
    p50, p99 = np.percentile([lag for lag, _ in starts], [50, 99]) * 1000
    program_ms = np.mean([cpu for _, cpu in starts]) * 1000
    return (
        f"{name:>10}: {len(starts) / wall_s:5.1f} rollouts/s, start lag p50 {p50:.0f} ms, "
        f"p99 {p99:.0f} ms; CPU of one: program {program_ms:.0f} ms, runner {runner_ms:.1f} ms"
    )


async def start(runner: Runner) -> tuple[float, float]:
    """Seconds from the request to the program's being ready, and its CPU seconds by then."""
    task = Task(task_id="bench", data_json="{}")
    rollout = Rollout(
        rollout_id="bench", group_id="bench", task=task, mode="serve", step=0, attempt=0
    )
    asked_at = time.time()
    result = await runner.run(rollout, BASE_URL, "no-key")
    assert result.kind == "ok", result.message
    ready_at, cpu_s = map(float, result.stdout.split())
    return ready_at - asked_at, cpu_s


def grade(task: object, workdir: object, stdout: object) -> None:
    """No reward."""


if __name__ == "__main__":
    main()
