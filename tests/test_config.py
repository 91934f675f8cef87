"""A wrong setting is told by name, with what would do."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ray.cli import main
from lightning_ray.config import load_config, load_function
from lightning_ray.errors import ConfigError

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_loads_and_says_first_what_it_needs(path: Path) -> None:
    assert load_config(path).name
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("model: {path: m}", [], "`name` is missing"),
        ("name: a", [], "`model` is missing"),
        ("name: a\nmodel: {pth: m}", [], r"`model.pth` is no setting.*did you mean `path`"),
        ("name: a\nmodel: {path: m}", ["train.lrr=1"], r"`train.lrr` is no setting.*`lr`"),
        ("name: a\nmodel: {path: m}", ["train.lr=fast"], r"`train.lr`.*got \"fast\""),
        ("name: a\nmodel: {path: m}", ["train.lr=-1"], "greater than 0"),
        ("name: a\nmodel: {path: m}", ["train.lr"], "key.sub=value"),
        ("name: a\nmodel: {path: m}", ["name.sub=1"], "holds a value"),
        ("name: a\nmodel: {path: m}", ["collect.window=2"], "at least collect.groups"),
        ("name: [", [], "is not YAML"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, text: str, overrides: list[str], words: str
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(path, overrides)


def test_an_override_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: a\nmodel: {path: m}\ntrain: {lr: 1.0}")
    config = load_config(path, ["train.lr=1e-3", "collect.sampling.temperature=0.5"])
    assert (config.train.lr, config.collect.sampling.temperature) == (1e-3, 0.5)


def test_a_missing_file_model_folder_or_function_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(tmp_path / "no.yaml")]) == 1
    assert "could not be read: No such file" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="could not be imported"):
        load_function("no_such_module:f", root=".")
    with pytest.raises(ConfigError, match="no function 'nothing'"):
        load_function("json:nothing", root=".")


def test_a_missing_model_folder_is_told_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"name: a\nruns: {tmp_path}/runs\nmodel: {{path: {tmp_path}/none}}")
    assert main(["serve", str(path)]) == 1
    assert "must be a Hugging Face model folder" in capsys.readouterr().err


def test_a_busy_port_is_named_with_what_to_do() -> None:
    import socket

    from lightning_ray.gateway.deploy import check_free

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"gateway.port {port} .*in use.* 0 for a free one"):
            check_free("127.0.0.1", port)
