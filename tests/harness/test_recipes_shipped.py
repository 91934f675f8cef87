"""The recipes in configs/harness: whole, and safe with any text a task may hold."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_ray.errors import ConfigError
from lightning_ray.harness.recipe import PLACEHOLDERS, Recipe, load_recipe, substitute
from tests.harness.processes import ROOT

RECIPES = sorted((ROOT / "configs/harness").glob("*.yaml"))
PARSERS: dict[str, Callable[[str], Any]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
}
AWKWARD = [
    "-rf --help",
    "say \"x\" and 'y', \"\"\" and '''",
    "line\nline\r\n\ttab # no comment: [not, a, list]",
    "{task.other} {{home}} ${HOME} {} %s \\n \\",
    "naïve 日本 😀 \x7f",
]

pytestmark = pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)


def test_it_is_whole_and_says_how_to_install_its_program(path: Path) -> None:
    try:
        load_recipe(path, root=ROOT)
    except ConfigError as error:
        assert "is not installed" in str(error)  # noqa: PT017  # found out after all else
    assert path.read_text().startswith("# ")
    if path.stem != "python":  # which is a form to fill in
        assert read(path).install


@pytest.mark.parametrize("text", AWKWARD)
def test_its_files_are_well_formed_whatever_the_task_says(path: Path, text: str) -> None:
    values = values_of(text)
    for name, template in read(path).files.items():
        written = substitute(template, values, path=name)
        PARSERS.get(Path(name).suffix, str)(written)


@pytest.mark.parametrize("text", AWKWARD)
def test_the_tasks_text_is_one_word_and_no_option(path: Path, text: str) -> None:
    words = read(path).command
    for index, word in enumerate(words):
        if "{task" in word:
            assert re.fullmatch(r"(--[a-z-]+=)?\{task\.\w+\}", word)
            assert word.startswith("--") or "--" in words[:index]
            assert substitute(word, values_of(text)).endswith(text)


def read(path: Path) -> Recipe:
    return Recipe.model_validate(yaml.safe_load(path.read_text()))


def values_of(text: str) -> dict[str, object]:
    task = {"prompt": text, "question": text, "files": {"a.txt": text}}
    return {**{name: f"/{name}" for name in PLACEHOLDERS}, "task": task}
