"""Placeholders, and what a recipe's reader is told when it is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lightning_ray.errors import ConfigError
from lightning_ray.harness.recipe import Recipe, load_recipe, substitute
from tests.harness.processes import ROOT

NASTY = 'a "quote", a \\ and\na {task.other} é'
VALUES = {"base_url": "http://x", "task": {"text": NASTY, "n": 3, "deep": {"list": [1, None]}}}


def test_placeholder_is_filled_in_as_plain_text() -> None:
    assert (
        substitute("-u {base_url}/v1 {task.text} {task.n}", VALUES) == f"-u http://x/v1 {NASTY} 3"
    )
    assert substitute("{task.deep.list}", VALUES) == "[1, null]"
    assert json.loads(substitute("{task}", VALUES)) == VALUES["task"]


@pytest.mark.parametrize(
    "text", ['{"a": 1}', "{{task}}", "${task}", "{}", "{ task }", "{word}", "{'task': x}", "{Task}"]
)
def test_other_braces_stay(text: str) -> None:
    assert substitute(text, VALUES) == text


def test_any_text_is_safe_in_a_json_file() -> None:
    template = (
        '{"q": "is {task.text}?", "n": {task.n}, "t": {task}, "s": "{task}", "u": {base_url}}'
    )
    found = json.loads(substitute(template, VALUES, path="x.json"))
    assert found == {
        "q": f"is {NASTY}?",
        "n": 3,
        "t": VALUES["task"],
        "s": json.dumps(VALUES["task"]),
        "u": "http://x",
    }


@pytest.mark.parametrize("name", ["task.absent", "task.n.x", "base_url.x"])
@pytest.mark.parametrize("path", ["x.txt", "x.json"])
def test_unknown_placeholder_is_named_with_the_known_ones(name: str, path: str) -> None:
    with pytest.raises(ConfigError, match=r"`\{" + name) as caught:
        substitute(f'"{{{name}}}"', VALUES, path=path)
    assert "known are `{base_url}`, `{api_key}`" in str(caught.value)
    assert "`{task.text}`, `{task.n}`" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("command: [true", "is not YAML"),
        ("", "`recipe`: Input should be a valid dictionary"),
        ("comand: ['true']", "`comand` is no key of a recipe; known are command, env"),
        ("command: []", "`command`: List should have at least 1 item"),
        ("command: ['true']\nexit_codes: {2: failed}", "`exit_codes.2`: Input should be 'ok'"),
        ("command: ['true', '{base-url}', '{baseurl}']", "placeholder `{baseurl}` is not known"),
        ("command: [no-such]\ninstall: pip install x", "`no-such` was not found; pip install x"),
        ("command: ['{root}/no-such']", "the harness is not installed: `/"),
        ("command: ['true']\npreload: [no.such]", "preload module `no.such` is not installed"),
    ],
)
def test_wrong_recipe_says_what_and_what_would_do(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"recipe `{path}`")
    assert fault in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "configs/harness").glob("*.yaml")), ids=str)
def test_shipped_recipe_loads(path: Path) -> None:
    try:
        load_recipe(path, root=ROOT)
    except ConfigError as error:
        if "is not installed" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("command", "is_preloaded"),
    [
        (["{python}", "x.py", "-c"], True),
        (["python", "-m", "x"], True),
        (["python", "-c", "pass"], False),
        (["python", "-u", "x.py"], False),
        (["python"], False),
        (["node", "x.js"], False),
    ],
)
def test_preload_serves_scripts_and_modules(command: list[str], is_preloaded: bool) -> None:
    assert Recipe(command=command, preload=["json"]).is_preloaded == is_preloaded
    assert not Recipe(command=command).is_preloaded


def test_program_is_found_where_pip_put_it(tmp_path: Path) -> None:
    assert shutil.which("pytest", path="") is None
    path = tmp_path / "recipe.yaml"
    path.write_text("command: [pytest]")
    assert load_recipe(path).command == ["pytest"]
