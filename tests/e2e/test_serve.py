"""`lightning-ray serve` prints one line, and any client can be pointed at what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import anthropic
import openai
import pytest

from lightning_ray.store import read_trajectories
from tests.stack.test_calls import DIALECTS

ROOT = Path(__file__).parent.parent.parent


class Served:
    """The official SDKs at the printed address."""

    def __init__(self, line: str) -> None:
        printed = json.loads(line)
        assert set(printed) == {"base_url", "api_key", "model"}
        base_url, key = printed["base_url"], printed["api_key"]
        self.openai = openai.OpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=base_url, api_key=key, max_retries=0)


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_the_sdks_work_at_the_printed_address_streamed_and_not(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = tmp_path / "serve.yaml"
    config.write_text(
        f"name: served\nruns: {tmp_path}\nmodel: {{path: {tiny_model}, dtype: float32}}\n"
        "engine: {device: cpu, max_model_len: 1024, kv_cache_bytes: 134217728}\n"
        "gateway: {haproxy: false, replicas: 2}\n"  # the other tests: HAProxy, one replica
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_ray.cli", "serve", str(config)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1][-3000:]
        served = Served(line)
        tokens = [send(served) for send in DIALECTS]  # type: ignore[arg-type]
    finally:
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, ""), errors[-3000:]
    (trajectory,) = read_trajectories(tmp_path / "served" / "store")
    assert [len(call.sampled_ids) for call in trajectory.calls] == tokens
