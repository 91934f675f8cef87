"""The mini-swe-agent job: its tasks, its policy's template, and the real program in a rollout."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jinja2
import pytest

from jobs.mini_swe import tasks
from jobs.mini_swe.model import CHAT_TEMPLATE
from jobs.mini_swe.start import lay_out
from lightning_ray.harness.recipe import load_recipe
from tests.harness.processes import ROOT, rollout_of

SOLUTIONS = {
    "create-hello.txt": "echo hello > hello.txt",
    "create-color.txt": "echo blue > color.txt",
    "create-city.txt": "printf Oslo > city.txt",
    "rename": "git mv old.txt new.txt",
    "fix-script": "printf 'echo done' > run.sh",
    "delete": "rm trash.txt",
}
ALL = {task["task_id"]: task for task in tasks.train() + tasks.validate()}


@pytest.mark.parametrize("task_id", SOLUTIONS)
def test_only_the_solved_task_is_rewarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task_id: str
) -> None:
    task = ALL[task_id]
    monkeypatch.setenv("HOME", str(tmp_path))
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "agent")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "agent@localhost")
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    lay_out(task["files"])
    assert tasks.grade(task, repository, "") == 0.0
    assert tasks.grade({"check": SOLUTIONS[task_id]}, repository, "") == 1.0  # does it by sh
    assert tasks.grade(task, repository, "") == 1.0


def test_every_task_has_a_solution_here() -> None:
    assert set(ALL) == set(SOLUTIONS)
    assert len(ALL) == len(tasks.train()) + len(tasks.validate())


def test_check_that_hangs_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CHECK_TIMEOUT_S", 0.2)
    assert tasks.grade({"check": "sleep 60 & sleep 60"}, tmp_path, "") == 0.0


def test_template_shows_tools_and_calls_as_the_parser_reads_them() -> None:
    arguments = {"command": "ls"}
    call = {"function": {"name": "bash", "arguments": arguments}}
    as_text = {"function": {"name": "bash", "arguments": json.dumps(arguments)}}
    parameters = {"properties": {"command": {"type": "string"}}}
    tool = {"function": {"name": "bash", "description": "Run it", "parameters": parameters}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call, as_text]},
        {"role": "tool", "content": "a.txt"},
    ]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    written = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    assert template.render(messages=messages, tools=[tool], add_generation_prompt=True) == (
        '<|im_start|>system\nS\nRun it: <tool_call>{"name": "bash", "arguments": {"command": '
        '"..."}}</tool_call><|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n'
        f"{written}{written}<|im_end|>\n<|im_start|>tool\na.txt<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.heavy  # ten CPU seconds of imports
async def test_mini_swe_agent_solves_a_task_and_imports_nothing_after_the_fork(
    new_runner: Callable[..., Any], tmp_path: Path
) -> None:
    pytest.importorskip("minisweagent")
    program = tmp_path / "start.py"
    program.write_text(
        "import atexit, runpy, sys; before = set(sys.modules)\n"
        "atexit.register(lambda: print('late:', sorted(set(sys.modules) - before)))\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    recipe = load_recipe(ROOT / "configs/harness/mini_swe_agent.yaml", root=ROOT)
    python, *rest = recipe.command
    fields = recipe.model_dump() | {"command": [python, str(program), *rest]}
    runner = new_runner({"grader": "jobs.mini_swe.tasks:grade", "timeout_s": 60}, **fields)
    requests: list[Any] = []
    commands = [SOLUTIONS["rename"], "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"]
    with _policy(commands, requests) as base_url:
        result = await runner.run(rollout_of(**ALL["rename"]), base_url, "sk-rollout")
    assert (result.kind, result.reward) == ("ok", 1.0), result
    assert result.stdout.endswith("late: []")
    assert len(requests) == 2
    assert ALL["rename"]["prompt"] in requests[0]["messages"][1]["content"]
    assert ALL["rename"]["check"] not in json.dumps(requests)
    assert requests[1]["messages"][-1] == {
        "role": "tool",
        "tool_call_id": "call-0",
        "content": "returncode 0\n",
    }


@contextmanager
def _policy(commands: list[str], requests: list[Any]) -> Iterator[str]:
    """A model that calls bash with one command after the other."""

    class Policy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            number = len(requests)
            requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            arguments = json.dumps({"command": commands[number]})
            call = {"name": "bash", "arguments": arguments}
            calls = [{"id": f"call-{number}", "type": "function", "function": call}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            reply = {"id": "c", "object": "chat.completion", "created": 1, "model": "policy"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            body = json.dumps({**reply, "choices": [choice], "usage": usage}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Policy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/rollout/r/attempt/0"
    server.shutdown()
    server.server_close()
