"""How a harness's ending becomes a result, and what the grader may do to it."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lightning_ray.config import HarnessConfig
from lightning_ray.errors import ConfigError
from lightning_ray.harness.recipe import load_recipe
from lightning_ray.harness.runner import start_runners
from tests.harness.processes import BASE_URL, PROGRAMS, ROOT, rollout_of

GRADERS = "tests.harness.graders"


async def test_graded_on_its_files_and_its_output(run: Callable[..., Any]) -> None:
    recipe = {"command": ["sh", "-c", "cat answer"], "files": {"answer": "{task.says}"}}
    config = {"grader": f"{GRADERS}:reads"}
    right = await run(config, {"answer": "42", "says": "42"}, **recipe)
    wrong = await run(config, {"answer": "42", "says": "41"}, **recipe)
    assert (right.kind, right.exit_code, right.reward, right.message) == ("ok", 0, 1.0, "")
    assert (wrong.kind, wrong.exit_code, wrong.reward, wrong.message) == ("ok", 0, 0.0, "")
    assert right.stdout == "42"
    assert right.running_s > 0


@pytest.mark.parametrize(
    ("status", "kind", "reward"),
    [(0, "ok", 1.0), (2, "agent_failed", 1.0), (4, "context_overflow", 1.0), (5, "infra", None)],
)
async def test_exit_code_means_what_the_recipe_says(
    run: Callable[..., Any], status: int, kind: str, reward: float | None
) -> None:
    codes = {2: "agent_failed", 4: "context_overflow", 5: "infra"}
    result = await run(command=["sh", "-c", f"exit {status}"], exit_codes=codes)
    assert (result.kind, result.exit_code, result.reward) == (kind, status, reward)


async def test_other_exit_code_is_a_crash_that_says_why(run: Callable[..., Any]) -> None:
    result = await run(command=["sh", "-c", "echo of no use >&2; exit 3"])
    assert (result.kind, result.exit_code, result.reward) == ("harness_crash", 3, None)
    assert re.fullmatch(r"harness exited with status 3 after \d+\.\d s: of no use", result.message)


async def test_signal_is_named(run: Callable[..., Any]) -> None:
    result = await run(command=["sh", "-c", "kill -SEGV $$"])
    assert (result.kind, result.exit_code) == ("harness_crash", -11)
    assert result.message.startswith("harness was killed by SIGSEGV after ")


async def test_only_the_end_of_a_noisy_stderr_is_kept(run: Callable[..., Any]) -> None:
    result = await run(command=["{python}", f"{PROGRAMS}/noisy.py"])
    assert result.message.endswith("\nthe reason")
    assert len(result.stderr) <= 4096
    assert len(result.stderr.splitlines()) <= 20


async def test_file_without_end_is_cut_off(run: Callable[..., Any]) -> None:
    # A sparse file; the limit is on its length.
    recipe = {"command": ["sh", "-c", "truncate -s 2G big || exit 3"]}
    result = await run(**recipe)
    assert result.kind == "harness_crash"


async def test_program_that_is_missing_is_no_fault_of_the_agent(run: Callable[..., Any]) -> None:
    for recipe in (
        {"command": ["no-such-program"]},
        {"command": ["{python}", "{workdir}/no-such.py"], "preload": ["json"]},
    ):
        result = await run(**recipe)
        assert (result.kind, result.exit_code, result.reward) == ("infra", None, None)
        assert result.message.startswith("harness could not be started: [Errno 2] No such file")
        assert "no-such" in result.message


async def test_argument_that_no_program_can_take_is_named(run: Callable[..., Any]) -> None:
    result = await run(task={"text": "a\0b"}, command=["echo", "{task.text}"])
    assert (result.kind, result.message) == (
        "infra",
        "harness could not be started: embedded null byte",
    )


async def test_output_that_became_a_pipe_does_not_stop_the_runner(run: Callable[..., Any]) -> None:
    result = await run(command=["sh", "-c", "rm ../stdout ../stderr; mkfifo ../stdout ../stderr"])
    assert (result.kind, result.stdout, result.stderr) == ("ok", "", "")


async def test_what_a_preload_did_does_not_show_in_the_program(run: Callable[..., Any]) -> None:
    env = {"PYTHONPATH": PROGRAMS}
    result = await run(
        command=["{python}", f"{PROGRAMS}/shows.py"], env=env, preload=["early", "json.tool"]
    )
    seen = json.loads(result.stdout)  # what `early` printed is not there
    assert seen["is_preloaded"]
    assert seen["tmp"] == seen["environ"]["TMPDIR"]


async def test_broken_pipe_ends_a_program_as_anywhere(run: Callable[..., Any]) -> None:
    result = await run(command=["sh", "-c", "kill -PIPE $$"])
    assert result.exit_code == -13  # Python ignores SIGPIPE, and a program would inherit that


async def test_slots_bound_how_many_run_at_once(new_runner: Callable[..., Any]) -> None:
    runner = new_runner({"slots": 2}, command=["sleep", "0.3"])
    runs = [runner.run(rollout_of(), BASE_URL, "key") for _ in range(4)]
    results = await asyncio.gather(*runs)
    assert [result.queued_s > 0.25 for result in results] == [False, False, True, True]
    assert all(result.running_s >= 0.3 for result in results)


async def test_closed_runner_ends_what_waits(new_runner: Callable[..., Any]) -> None:
    runner = new_runner({"slots": 1}, command=["sleep", "60"])
    runs = [asyncio.ensure_future(runner.run(rollout_of(), BASE_URL, "key")) for _ in range(3)]
    await asyncio.sleep(0.2)
    await runner.close()
    assert {(await run).kind for run in runs} == {"infra"}


@pytest.mark.parametrize(
    ("grader", "task", "fault"),
    [
        ("gives", {"gives": "nan"}, "returned nan"),
        ("gives", {"gives": "inf"}, "returned inf"),
        ("gives", {"gives": "bool"}, "returned True"),
        ("gives", {"gives": "text"}, "returned '1.0'"),
        ("fails", {}, "failed with KeyError: 'missing'"),
        ("leaves", {}, "failed with SystemExit: 0"),
        ("hangs", {}, "did not end in 0.2 s (harness.grader_timeout_s)"),
    ],
)
async def test_grader_at_fault_gives_no_reward(
    run: Callable[..., Any], grader: str, task: dict[str, Any], fault: str
) -> None:
    config = {"grader": f"{GRADERS}:{grader}", "grader_timeout_s": 0.2}
    result = await run(config, task, command=["true"])
    assert (result.kind, result.exit_code, result.reward) == ("infra", 0, None)
    assert result.message == (
        f"grader `{GRADERS}:{grader}` {fault}; it must return a finite number or None"
    )


async def test_grader_may_decline(run: Callable[..., Any]) -> None:
    result = await run({"grader": f"{GRADERS}:declines"}, command=["true"])
    assert (result.kind, result.reward) == ("ok", None)


async def test_preload_that_fails_says_why(run: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"was not imported(.|\n)*No module named 'absent'"):
        await run(command=["{python}", "x.py"], preload=["absent"])


async def test_task_that_does_not_fit_the_recipe_says_what_it_lacks(
    run: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match=r"`\{task.question\}` is not known.*`\{task.prompt\}`"):
        await run(task={"prompt": "?"}, command=["echo", "{task.question}"])


async def test_file_outside_the_rollout_is_refused(run: Callable[..., Any]) -> None:
    for name in ("../../x", "/etc/x"):
        with pytest.raises(ConfigError, match="must be below"):
            await run(command=["true"], files={name: ""})


async def test_files_are_written_before_the_start(run: Callable[..., Any]) -> None:
    files = {"a/b.txt": "in workdir", "{home}/.config/c.toml": "{task.text} {{task}} {print}"}
    command = ["sh", "-c", 'cat a/b.txt "$HOME/.config/c.toml"']
    result = await run(task={"text": "x"}, command=command, files=files)
    assert result.stdout == "in workdirx {{task}} {print}"


def test_bad_recipe_or_grader_is_found_before_any_actor_starts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("command: ['true']")
    for name, grader, fault in (
        ("none", "one", "none.yaml` could not be read: No such file"),
        ("recipe", "absent", "has no function 'absent'"),
    ):
        config = HarnessConfig(recipe=f"{tmp_path}/{name}.yaml", grader=f"{GRADERS}:{grader}")
        with pytest.raises(ConfigError, match=fault):
            start_runners(config, root=ROOT)


async def test_quickstart_imports_nothing_after_the_fork(
    new_runner: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    program = tmp_path / "agent.py"
    program.write_text(
        "import sys; before = set(sys.modules)\n"
        "import openai\n"
        "client = openai.OpenAI()\n"
        "messages = [{'role': 'user', 'content': '?'}]\n"
        "answer = client.chat.completions.create(model='policy', messages=messages)\n"
        "print(answer.choices[0].message.content, sorted(set(sys.modules) - before))\n"
    )
    recipe = load_recipe(ROOT / "configs/harness/calculator.yaml", root=ROOT)
    fields = recipe.model_dump() | {"command": ["{python}", str(program)]}
    runner = new_runner({}, **fields)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base_url = f"http://127.0.0.1:{server.server_port}/rollout/r/attempt/0"
    result = await runner.run(rollout_of(question='"?"'), base_url, "sk-rollout")
    server.shutdown()
    server.server_close()
    assert (result.stdout, result.stderr) == ("42 []", "")


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/rollout/r/attempt/0/v1/chat/completions"
        assert self.headers["authorization"] == "Bearer sk-rollout"
        body = (
            b'{"id": "c", "object": "chat.completion", "created": 1, "model": "policy", "choices":'
            b' [{"index": 0, "message": {"role": "assistant", "content": "42"}, "finish_reason":'
            b' "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}'
        )
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
