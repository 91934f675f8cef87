"""Runners on the programs beside this file."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lightning_ray.config import HarnessConfig
from lightning_ray.harness.recipe import Recipe
from lightning_ray.harness.runner import Runner
from tests.harness.processes import BASE_URL, ROOT, rollout_of


@pytest.fixture
async def new_runner() -> AsyncIterator[Callable[..., Runner]]:
    """Makes runners of a recipe, given as its fields; they are closed at the end."""
    runners = []

    def make(config: dict[str, Any] | None = None, **recipe: Any) -> Runner:
        settings = {
            "recipe": "-",
            "grader": "tests.harness.graders:one",
            "timeout_s": 20,
            **(config or {}),
        }
        runner = Runner(
            HarnessConfig.model_validate(settings),
            recipe=Recipe.model_validate(recipe),
            model="policy",
            root=str(ROOT),
        )
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        await runner.close()


@pytest.fixture
def run(new_runner: Callable[..., Runner]) -> Callable[..., Any]:
    """Runs one rollout of a recipe: its result."""

    async def once(
        config: dict[str, Any] | None = None, task: dict[str, Any] | None = None, **recipe: Any
    ) -> Any:
        runner = new_runner(config, **recipe)
        return await runner.run(rollout_of(**(task or {})), BASE_URL, "sk-rollout")

    return once
