"""Real clients hold whole sessions, with tools, against a real engine whose policy is scripted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import ray

from lightning_ray.config import HarnessConfig
from lightning_ray.errors import ConfigError
from lightning_ray.harness.recipe import load_recipe
from lightning_ray.harness.runner import Runner, RunResult
from lightning_ray.samples import build_samples
from lightning_ray.schema import Call, Task
from tests import clients
from tests.clients import ROOT, Client, nightly
from tests.conftest import Stack
from tests.stack.test_calls import Seat, assert_witnessed

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

END = "<|im_end|>"
PROMPT = 'Make the file "made.txt".'
TASK = {"prompt": PROMPT, "path": "made.txt", "text": "by the agent\n", "files": {}}
CONTEXT = 131072  # the tiny model reads bytes
FIRST = "git init --quiet && echo first-$((20 + 3))"
SECOND = "echo by the agent > made.txt; echo second-$((40 + 5))"
HOLD_S = float(os.environ.get("LR_HOLD_S", "12"))
"""How long the nightly weight update holds every call; 370 tries the clients' real clocks."""
Play = Callable[..., list[str]]


@pytest.fixture
def play(stack: Stack) -> Play:
    """Writes the script: pairs of what is new to the policy and what it answers."""
    path = Path(os.environ["LR_TEST_SCRIPT"])

    def write(*rules: tuple[str, str]) -> list[str]:
        script = [{"when": re.escape(when), "say": say} for when, say in rules]
        half = path.with_suffix(".new")
        half.write_text(json.dumps(script))
        half.rename(path)
        return [say for _, say in rules]

    return write


def use(tool: str, **arguments: Any) -> str:
    """A tool call as the tiny model's template writes it."""
    text = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>{text}</tool_call>"


def text_of(stack: Stack, call: Call) -> str:
    return str(tokenizer_in(stack.config.model.path).decode(call.sampled_ids))


@cache
def tokenizer_in(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def assert_played(stack: Stack, seat: Seat, dialect: str, says: Sequence[str]) -> None:
    """Each answer of the script is one call, recorded as it was sampled."""
    calls = seat.calls()
    assert [text_of(stack, call) for call in calls] == [say + END for say in says]
    assert {(call.dialect, call.status, call.finish_reason) for call in calls} == {
        (dialect, 200, "stop")
    }


def assert_one_sample(calls: Sequence[Call]) -> None:
    """Each prompt extends the call before it, token for token."""
    (sample,) = build_samples(calls, rollout_id="r", group_id="g")
    assert sample.mask.sum() == sum(len(call.sampled_ids) for call in calls)


# --- the scripted policy


def test_the_script_decides_and_what_it_does_not_know_is_left_to_the_model(
    stack: Stack, play: Play
) -> None:
    says = play(*((f"question {n}.", f"answer {n} " * (n + 1)) for n in range(8)), ("tool", "no"))
    seats = [Seat(stack) for _ in range(9)]

    def ask(index: int) -> None:
        question = [{"role": "user", "content": f"question {index}."}]
        seats[index].openai.chat.completions.create(
            model="x", messages=question, max_tokens=100
        )  # fmt: skip

    together = [threading.Thread(target=ask, args=[index]) for index in range(9)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join(60)
    for seat, say in zip(seats, says[:8], strict=False):
        assert_played(stack, seat, "chat", [say])
    (unknown,) = seats[8].calls()
    assert text_of(stack, unknown) not in says
    assert (unknown.logprobs < 0).all()


def test_the_script_goes_on_after_sleep(stack: Stack, play: Play) -> None:
    (engine,) = stack.parts.engines
    says = play(("go", "0123456789" * 40))
    seat = Seat(stack)
    asking = threading.Thread(
        target=lambda: seat.openai.chat.completions.create(
            model="x", messages=[{"role": "user", "content": "go"}]
        )
    )
    asking.start()
    while not ray.get(engine.num_running.remote()):
        time.sleep(0.01)
    time.sleep(0.2)
    ray.get(engine.sleep.remote())
    assert ray.get(engine.num_running.remote()) == 1
    ray.get(engine.resume.remote())
    asking.join(60)
    assert_played(stack, seat, "chat", says)
    assert_witnessed(stack, seat.calls()[0])


# --- the SDKs


def shell(command: str, workdir: Path) -> str:
    return subprocess.run(
        ["sh", "-c", command], cwd=workdir, capture_output=True, text=True, check=True
    ).stdout


PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}


TOOLS: dict[str, dict[str, Any]] = {
    "chat/completions": {"type": "function", "function": {"name": "sh", "parameters": PARAMETERS}},
    "messages": {"name": "sh", "input_schema": PARAMETERS},
    "responses": {"type": "function", "name": "sh", "parameters": PARAMETERS},
}


def chat(seat: Seat, workdir: Path) -> str:
    function = {"name": "sh", "description": "Runs it.", "parameters": PARAMETERS}
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    while True:
        reply = seat.openai.chat.completions.create(
            model="policy", messages=messages,
            tools=[{"type": "function", "function": function}],
        )  # fmt: skip
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for asked in message.tool_calls:
            output = shell(json.loads(asked.function.arguments)["command"], workdir)
            messages.append({"role": "tool", "tool_call_id": asked.id, "content": output})


def responses(seat: Seat, workdir: Path) -> str:
    tool = {"type": "function", "name": "sh", "description": "Runs it.", "parameters": PARAMETERS}
    items: list[Any] = [{"role": "user", "content": PROMPT}]
    while True:
        with seat.openai.responses.stream(model="policy", input=items, tools=[tool]) as stream:
            for _ in stream:
                pass
            reply = stream.get_final_response()
        items += [item.model_dump(exclude_none=True) for item in reply.output]
        asked = [item for item in reply.output if item.type == "function_call"]
        if not asked:
            return reply.output_text
        for item in asked:
            output = shell(json.loads(item.arguments)["command"], workdir)
            items.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": output}
            )


def messages(seat: Seat, workdir: Path) -> str:
    tool = {"name": "sh", "description": "Runs it.", "input_schema": PARAMETERS}
    history: list[Any] = [{"role": "user", "content": PROMPT}]
    while True:
        with seat.anthropic.messages.stream(
            model="policy", max_tokens=500, messages=history, tools=[tool]
        ) as stream:  # fmt: skip
            reply = stream.get_final_message()
        history.append({"role": "assistant", "content": reply.to_dict()["content"]})
        asked = [block for block in reply.content if block.type == "tool_use"]
        if not asked:
            return "".join(block.text for block in reply.content if block.type == "text")
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": shell(str(block.input["command"]), workdir),
            }
            for block in asked
        ]
        history.append({"role": "user", "content": results})


@pytest.mark.parametrize("agent", [chat, responses, messages], ids=lambda agent: agent.__name__)
def test_a_session_of_an_sdk_is_one_sample(
    stack: Stack, play: Play, tmp_path: Path, agent: Callable[[Seat, Path], str]
) -> None:
    seat = Seat(stack)
    says = play(
        (PROMPT, use("sh", command=FIRST)),
        ("first-23", use("sh", command=SECOND) + use("sh", command="git status --short")),
        ("?? made.txt", "It is made."),
    )
    assert agent(seat, tmp_path) == "It is made."
    assert clients.made(TASK, tmp_path, "") == 1.0
    assert_played(stack, seat, agent.__name__, says)
    assert_witnessed(stack, seat.calls()[-1])
    assert_one_sample(seat.calls())


def test_an_oddly_written_call_that_comes_back_tidied_is_continued(
    stack: Stack, play: Play, tmp_path: Path
) -> None:
    seat = Seat(stack)
    odd = (
        '<tool_call>\n{"arguments" : {"command":  "echo first-$((20 + 3)) h\\u00e9"},"name":"sh"}\n'
    )
    says = play((PROMPT, f"I try it.\n{odd}</tool_call>"), ("first-23 hé", "It is tried."))
    messages(seat, tmp_path)
    assert_played(stack, seat, "messages", says)
    assert [call.joined for call in seat.calls()] == ["first", "continued"]
    assert_one_sample(seat.calls())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_r18_a_call_that_cannot_be_parsed_is_handed_on_and_recorded_as_it_is(
    stack: Stack, play: Play, route: str, streamed: bool
) -> None:
    seat = Seat(stack)
    (said,) = play((PROMPT, '<tool_call>{"name": "sh", "arguments": {"command": "ls}</tool_call>'))
    body = {
        "messages": [{"role": "user", "content": PROMPT}], "input": PROMPT, "stream": streamed,
        "max_tokens": 200, "tools": [TOOLS[route]],
    }  # fmt: skip
    reply = httpx.post(
        f"{seat.base_url}/v1/{route}", json=body, headers={"x-api-key": seat.key}, timeout=60
    )
    assert reply.status_code == 200
    (called,) = seat.calls()
    assert (called.status, text_of(stack, called)) == (200, said + END)


def test_r19_system_messages_stay_in_place_and_billing_blocks_go(stack: Stack) -> None:
    seat = Seat(stack)
    seat.anthropic.messages.create(
        model="x", max_tokens=2,
        system=[{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.4e6;"},
                {"type": "text", "text": "You are an agent."}],
        messages=[{"role": "user", "content": "one"},
                  {"role": "system", "content": "Today is Monday."},  # type: ignore[list-item]
                  {"role": "user", "content": "two"}],
    )  # fmt: skip
    (called,) = seat.calls()
    prompt = tokenizer_in(stack.config.model.path).decode(called.prompt_ids)
    assert "billing" not in prompt
    places = [prompt.index(words) for words in ("You are", "one", "Today is", "two")]
    assert places == sorted(places)


# --- the clients, started by their recipes


async def session(
    stack: Stack,
    seat: Seat,
    client: str,
    *,
    base_url: str | None = None,
    swap: Mapping[str, str] | None = None,
    **env: str,
) -> RunResult:
    """How a client did on the task, started by its recipe as in a run; prints what was said.

    swap: what to write in the recipe's command and files in place of what.
    """
    recipe = load_recipe(ROOT / f"configs/harness/{client}.yaml", root=ROOT)

    def swapped(text: str) -> str:
        for old, new in (swap or {}).items():
            text = text.replace(old, new)
        return text

    runner = Runner(
        HarnessConfig(recipe="-", grader="tests.clients:made", timeout_s=240 + HOLD_S),
        recipe=recipe.model_copy(
            update={
                "command": [swapped(word) for word in recipe.command],
                "files": {name: swapped(text) for name, text in recipe.files.items()},
                "env": {**recipe.env, **env},
            }
        ),
        model="policy",
        root=str(ROOT),
    )
    task = Task(task_id="t", data_json=json.dumps(TASK))
    try:
        rollout = replace(seat.rollout, task=task)
        return await runner.run(rollout, base_url or seat.base_url, seat.key)
    finally:
        await runner.close()
        for call in seat.calls():  # shown when the test fails
            news = tokenizer_in(stack.config.model.path).decode(call.prompt_ids)[-300:]
            print(
                f"{call.status} {call.kind} {call.joined}: ...{news!r} -> {text_of(stack, call)!r}"
            )


@contextmanager
def held(stack: Stack, hold_s: float) -> Iterator[None]:
    """Calls wait at the gate for `hold_s` from here, as they do while weights move."""
    ray.get(stack.parts.gate.close.remote(0.0))
    opening = threading.Timer(hold_s, lambda: ray.get(stack.parts.gate.open.remote()))
    opening.start()
    try:
        yield
    finally:
        opening.join()


@asynccontextmanager
async def counted(url: str) -> AsyncIterator[tuple[str, list[str]]]:
    """An address where all is passed on to `url`, and the requests that have been made there."""
    there = urlsplit(url)
    requests: list[str] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                requests.extend(["POST"] * data.count(b"POST /rollout"))
                writer.write(data)
                await writer.drain()
        writer.close()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, asks = await asyncio.open_connection(there.hostname, there.port)
        await asyncio.gather(pump(reader, asks), pump(answers, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield there._replace(netloc=f"127.0.0.1:{port}").geturl(), requests


def provide(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client on the PATH; skips the test where it cannot be installed."""
    clients.install(client)
    monkeypatch.setenv("PATH", os.pathsep.join([client.path, os.environ["PATH"]]))


async def test_claude_code_works_through_its_recipe(
    stack: Stack, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(clients.CLAUDE_CODE, monkeypatch)
    seat = Seat(stack)
    says = play(
        (PROMPT, use("Bash", command=FIRST)),
        ("first-23", use("Bash", command=SECOND) + use("Bash", command="git status --short")),
        ("?? made.txt", "It is made."),
    )
    result = await session(stack, seat, "claude_code")
    assert (result.kind, result.reward, result.stdout) == ("ok", 1.0, "It is made."), result
    assert_played(stack, seat, "messages", says)
    assert_one_sample(seat.calls())


async def test_codex_works_through_its_recipe(
    stack: Stack, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(clients.CODEX, monkeypatch)
    seat = Seat(stack)
    says = play(
        (PROMPT, use("exec_command", cmd=FIRST)),
        ("first-23", "I make it." + use("exec_command", cmd=SECOND)),
        ("second-45", "It is made."),
    )
    result = await session(stack, seat, "codex")
    assert (result.kind, result.reward, result.stdout) == ("ok", 1.0, "It is made."), result
    assert_played(stack, seat, "responses", says)
    assert_one_sample(seat.calls())


@nightly  # ten seconds: only the whole Claude Code has sub-agents
async def test_a_sub_agent_of_claude_code_is_a_sample_of_its_own(
    stack: Stack, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(clients.CLAUDE_CODE, monkeypatch)
    seat = Seat(stack)
    order = {"description": "make it", "prompt": "Do the job.", "run_in_background": False}
    says = play(
        (PROMPT, use("Agent", subagent_type="general-purpose", **order)),
        ("Do the job.", use("Bash", command=SECOND)),
        ("second-45", "The job is done."),
        ("The job is done.", "It is made."),
    )
    result = await session(
        stack, seat, "claude_code", swap={"--tools=Bash": "--tools=Bash,Agent", "--bare": "--print"}
    )
    assert (result.kind, result.reward, result.stdout) == ("ok", 1.0, "It is made."), result
    assert_played(stack, seat, "messages", says)
    ask, work, report, end = seat.calls()
    assert_one_sample([ask, end])
    assert_one_sample([work, report])


async def test_a_call_that_claude_code_cuts_and_sends_again_is_sampled_once(
    stack: Stack, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(clients.CLAUDE_CODE, monkeypatch)
    seat = Seat(stack)
    says = play(
        (PROMPT, use("Bash", command=FIRST)),
        ("first-23", use("Bash", command=SECOND)),
        ("second-45", "It is made."),
    )
    (engine,), gate = stack.parts.engines, stack.parts.gate
    ray.get([gate.close.remote(0.0), engine.sleep.remote()])
    async with counted(seat.base_url) as (base_url, requests):
        running = asyncio.ensure_future(
            session(stack, seat, "claude_code", base_url=base_url, API_TIMEOUT_MS="3000")
        )
        for num_requests, release in ((2, gate.open), (3, engine.resume)):  # cut at each
            while len(requests) < num_requests and not running.done():
                await asyncio.sleep(0.05)
            await release.remote()
        result = await running
    assert (result.kind, result.reward) == ("ok", 1.0), result
    assert_played(stack, seat, "messages", says)
    assert_one_sample(seat.calls())


async def test_codex_waits_longer_than_its_patience_while_weights_move(
    stack: Stack, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    provide(clients.CODEX, monkeypatch)
    seat = Seat(stack)
    says = play((PROMPT, use("exec_command", cmd=SECOND)), ("second-45", "It is made."))
    with held(stack, 7):
        result = await session(stack, seat, "codex", swap={"1800000": "2000"})
    assert (result.kind, result.reward) == ("ok", 1.0), result
    assert "econnect" not in result.stderr
    assert_played(stack, seat, "responses", says)


# --- slow clients


SLOW = {
    "mini_swe_agent": (None, "bash", {}),
    "opencode": (clients.OPENCODE, "bash", {"description": "Runs it"}),
    "qwen_code": (clients.QWEN_CODE, "run_shell_command", {"is_background": False}),
    "openclaw": (clients.OPENCLAW, "exec", {}),
    "openhands": (None, "terminal", {"security_risk": "LOW"}),
}


@nightly
@pytest.mark.parametrize("name", SLOW)
async def test_a_slow_client_works_through_its_recipe(
    stack: Stack, play: Play, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    client, tool, more = SLOW[name]
    if client is not None:
        provide(client, monkeypatch)
    try:
        load_recipe(ROOT / f"configs/harness/{name}.yaml", root=ROOT)
    except ConfigError as error:
        pytest.skip(str(error))
    submit = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # mini-swe-agent ends with this
    end = use(tool, command=submit) if name == "mini_swe_agent" else "It is made."
    again = use(tool, command=SECOND, **more)
    says = play(
        ("second-45", end),
        ("Command: echo", end),  # under load Qwen Code says of some command that it printed nothing
        ("first-23", again),
        ("Command: git init", again),
        ("made.txt", use(tool, command=FIRST, **more)),
    )
    seat = Seat(stack)
    result = await session(stack, seat, name, swap={"32768": str(CONTEXT)})
    assert (result.kind, result.reward) == ("ok", 1.0), result
    played = [call for call in seat.calls() if text_of(stack, call).removesuffix(END) in says]
    assert len(played) >= 3
    assert {call.status for call in seat.calls()} == {200}


@nightly
@pytest.mark.timeout(1800)
async def test_sessions_of_all_kinds_survive_a_long_weight_update(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tools = {"Bash": "command", "exec_command": "cmd", "bash": "command", "sh": "command"}
    submit = use("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    rules = [{"when": "returncode[^?]*second-45", "say": submit},
             {"when": "second-45", "say": "It is made."}]  # fmt: skip
    rules += [
        {"when": f'"name": "{tool}"(.|\n)*made.txt', "say": use(tool, **{key: SECOND})}
        for tool, key in tools.items()
    ]
    Path(os.environ["LR_TEST_SCRIPT"]).write_text(json.dumps(rules))
    for client in (clients.CLAUDE_CODE, clients.CODEX):
        provide(client, monkeypatch)
    programs = ["claude_code", "codex", "mini_swe_agent"]
    seats = [Seat(stack) for _ in range(len(programs) + 3)]
    folders = [tmp_path / f"sdk-{index}" for index in range(3)]
    for folder in folders:
        folder.mkdir()
    with held(stack, HOLD_S):
        results = await asyncio.gather(
            *(session(stack, seat, name) for seat, name in zip(seats, programs, strict=False)),
            *(
                asyncio.to_thread(agent, seat, folder)
                for agent, seat, folder in zip(
                    (chat, responses, messages), seats[3:], folders, strict=True
                )
            ),
        )
    assert [result.reward for result in results[:3]] == [1.0] * 3, results  # type: ignore[union-attr]
    assert results[3:] == ["It is made."] * 3
    for seat in seats:
        calls = seat.calls()
        assert [call.status for call in calls] == [200, 200]
        assert calls[0].duration_s > HOLD_S / 2
        assert_one_sample(calls)
