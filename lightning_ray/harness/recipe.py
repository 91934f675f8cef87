"""The recipe: how to run a program as a harness, read from YAML, and its placeholders.

    command: ["{python}", "{root}/agent.py"]
    preload: [openai]
    files: {task.json: '{"question": "{task.question}"}'}

A placeholder is a word in single braces. In `command` and `env` every such word must be known; in
`files` only `{task.…}` must, since a file may use braces for its own ends. `{{word}}` and `${word}`
stay as they are.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lightning_ray.errors import ConfigError
from lightning_ray.schema import OutcomeKind

PLACEHOLDERS = ("base_url", "api_key", "model", "workdir", "home", "python", "root", "task")
_PLACEHOLDER = re.compile(r"\{\{[^{}]*\}\}|(?<!\$)\{([a-z_]+(?:\.[\w-]+)*)\}")
_JSON_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)


class Recipe(BaseModel):
    """How to run one program as a harness."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True
    )

    command: list[str] = Field(min_length=1)
    env: dict[str, str] = {}
    """Added to the scrubbed environment; wins over its defaults."""
    files: dict[str, str] = {}
    """Text by path, written before the start; a relative path is below `{workdir}`."""
    preload: list[str] = []
    """Modules a Python program finds already imported; it is then forked, not executed."""
    exit_codes: dict[int, OutcomeKind] = {}
    """What the program means by a status that is not 0; any other is a `harness_crash`."""
    install: str = ""
    """How to install the program, for the message that it is missing."""

    @property
    def is_preloaded(self) -> bool:
        """Whether there is a preload, and `{python} script` or `{python} -m module` to use it."""
        program, *rest = self.command
        is_python = program in ("{python}", "python", "python3", sys.executable)
        starts = bool(rest) and (not rest[0].startswith("-") or (rest[0] == "-m" and len(rest) > 1))
        return bool(self.preload) and is_python and starts


def load_recipe(path: str | Path, *, root: str | Path = ".") -> Recipe:
    """The recipe in a YAML file; raises ConfigError when it is wrong or its program is missing.

    root: what `{root}` stands for, and what a relative path in `command` is relative to.
    """
    try:
        tree = yaml.safe_load(Path(path).read_text())
        recipe = Recipe.model_validate(tree)
    except OSError as error:
        raise ConfigError(f"recipe `{path}` could not be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe `{path}` is not YAML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"recipe `{path}`: {_explain(error)}") from error
    for text in (*recipe.command, *recipe.env.values()):
        _check_words(text, where=f"recipe `{path}`")
    _check_installed(recipe, where=f"recipe `{path}`", root=Path(root).absolute())
    return recipe


def substitute(text: str, values: Mapping[str, object], *, path: str = "") -> str:
    """`text` with its placeholders filled in; raises ConfigError for a `{task.…}` that is missing.

    path: where the text will be written. In a `.json` file a value inside a string is escaped,
          and one outside becomes JSON itself, so the file is valid JSON whatever the value.

    '{"q": "{task.q}"}' with q = 'say "x"' gives '{"q": "say \\"x\\""}' in a `.json` file.
    """
    if not path.endswith(".json"):
        return _fill(text, values, _plain)
    parts, end = [], 0
    for string in _JSON_STRING.finditer(text):
        parts += [_fill(text[end : string.start()], values, json.dumps), '"']
        parts += [_fill(string[0][1:-1], values, _escaped), '"']
        end = string.end()
    return "".join([*parts, _fill(text[end:], values, json.dumps)])


def is_constant(text: str) -> bool:
    """Whether `text` is the same for every rollout."""
    return all(name in (None, "python", "root", "model") for name in _names(text))


def search_path() -> str:
    """The PATH of a harness: the folder of this Python first, so what pip installed is found."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def _fill(text: str, values: Mapping[str, object], render: Callable[[Any], str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name is None or name.partition(".")[0] not in values:
            return match[0]
        return render(_look_up(name, values))

    return _PLACEHOLDER.sub(value, text)


def _look_up(name: str, values: Mapping[str, object]) -> object:
    found: object = values
    for key in name.split("."):
        if not isinstance(found, Mapping) or key not in found:
            raise ConfigError(f"placeholder `{{{name}}}` is not known; {_known(values)}")
        found = found[key]
    return found


def _known(values: Mapping[str, object]) -> str:
    task = values.get("task")
    keys = [f"task.{key}" for key in task] if isinstance(task, Mapping) else ["task.<key>"]
    return "known are " + ", ".join(f"`{{{name}}}`" for name in (*PLACEHOLDERS, *keys))


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _escaped(value: object) -> str:
    return json.dumps(_plain(value))[1:-1]


def _names(text: str) -> Iterable[str | None]:
    return (match[1] for match in _PLACEHOLDER.finditer(text))


def _check_words(text: str, *, where: str) -> None:
    for name in _names(text):
        if name is not None and name.partition(".")[0] not in PLACEHOLDERS:
            raise ConfigError(
                f"{where}: placeholder `{{{name}}}` is not known; {_known({})}. "
                "Braces that are meant as such belong in a file of `files:`."
            )


def _check_installed(recipe: Recipe, *, where: str, root: Path) -> None:
    program = substitute(recipe.command[0], {"python": sys.executable, "root": str(root)})
    how = recipe.install or "install it where this Python or PATH has it"
    found = shutil.which(root / program if "/" in program else program, path=search_path())
    if found is None and is_constant(program):
        raise ConfigError(
            f"{where}: the harness is not installed: `{program}` was not found; {how}"
        )
    for module in recipe.preload:
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            raise ConfigError(f"{where}: preload module `{module}` is not installed; {how}")


def _explain(error: ValidationError) -> str:
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"]) or "recipe"
        if fault["type"] == "extra_forbidden":
            known = ", ".join(Recipe.model_fields)
            lines.append(f"`{key}` is no key of a recipe; known are {known}")
        else:
            lines.append(f"`{key}`: {fault['msg']}; got {fault['input']!r}")
    return "; ".join(lines)
