"""One engine: vLLM's own server in a Ray actor, asleep until its weights are the ones asked for."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from lightning_ray.config import Config
from lightning_ray.errors import EngineError, LightningError, WeightsError

_TRANSFER = "lightning_ray.engine.transfer"


def start_engines(
    config: Config, *, group: PlacementGroup, secret: str, share: dict[str, float]
) -> list[Any]:
    """Handles of `config.engine.count` engines, engine i in bundle i; each still has to `start`."""
    actor = ray.remote(max_restarts=0, max_task_retries=0, max_concurrency=1000)(Engine)
    return [
        actor.options(
            name=f"engine/{index}",
            num_cpus=share["CPU"],
            num_gpus=share.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote(config, secret=secret)
        for index in range(config.engine.count)
    ]


class Engine:
    """vLLM's `AsyncLLM` and its OpenAI-compatible app in one process, captured at `generate`.

    Its HTTP port answers only callers with the run's secret: the gateway.
    """

    def __init__(self, config: Config, *, secret: str) -> None:
        self.config = config
        self.secret = secret
        os.environ |= {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        if config.engine.device == "cpu":
            # the worker inside the core's process: one process less to start
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            # vLLM compiles its CPU sampler even when eager: a minute of g++ on a fresh machine
            os.environ["TORCH_COMPILE_DISABLE"] = "1"

    async def start(self) -> str:
        """Load the model, serve it, and return the base URL; EngineError when it cannot."""
        # heavy: imported here, after the environment is set and only in the engine's process
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from lightning_ray.engine.capture import CapturingLLM, capture_app

        parser = make_arg_parser(FlexibleArgumentParser())
        args = parser.parse_args(server_arguments(self.config))
        engine_config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
        self.llm = CapturingLLM.from_vllm_config(engine_config)
        await self.llm.update_weight_version("0")
        tasks = await self.llm.get_supported_tasks()
        app = build_app(args, tasks, self.llm.model_config)
        await init_app_state(self.llm, app.state, args, tasks)
        if self.config.engine.continuation != "off":
            self.llm.sessions = await self._sessions(args.chat_template)
        grace_s = self.config.gateway.grace_s
        guarded, self._flights = capture_app(app, secret=self.secret, grace_s=grace_s)
        return await self._serve(guarded)

    async def _sessions(self, chat_template: str | None) -> Any:
        """The earlier calls of the rollouts served here, read from the store when unknown."""
        from vllm.renderers.chat_utils import load_chat_template

        from lightning_ray.engine.continuation import find_markers
        from lightning_ray.engine.sessions import Sessions

        tokenizer = self.llm.get_tokenizer()
        template = load_chat_template(chat_template)
        probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        with_prompt, without = (
            tokenizer.apply_chat_template(
                probe, chat_template=template, add_generation_prompt=asked, return_dict=False
            )
            for asked in (True, False)
        )
        special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        return Sessions(
            self._earlier_calls,
            markers=find_markers(
                with_prompt, without, special_ids=special_ids, eos_ids=self._stop_ids()
            ),
            decode=functools.partial(tokenizer.decode, skip_special_tokens=True),
            keep_reasoning=self.config.engine.continuation == "keep_reasoning",
        )

    def _stop_ids(self) -> set[int]:
        eos = self.llm.model_config.try_get_generation_config().get("eos_token_id", [])
        listed = eos if isinstance(eos, list) else [eos]
        return {*listed, self.llm.get_tokenizer().eos_token_id} - {None}

    async def _earlier_calls(self, rollout_id: str, attempt: int) -> Any:
        store = ray.get_actor("store")
        return await store.calls.remote(rollout_id, attempt)

    async def _serve(self, app: Any) -> str:
        import uvicorn

        address = self.config.gateway.host if self.config.engine.count == 1 else _node_address()
        listener = socket.create_server((address, 0), backlog=1024)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_keep_alive=600)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._serving.done():
                raise EngineError(f"the engine's server ended at once: {self._serving.exception()}")
            await asyncio.sleep(0.01)
        return "http://{}:{}".format(*listener.getsockname()[:2])

    async def num_running(self) -> int:
        """Requests the engine has not finished."""
        return self.llm.get_num_unfinished_requests()

    async def sleep(self) -> None:
        """Freeze running requests at a token boundary and give memory back."""
        self._flights.is_frozen = True
        await self.llm.pause_generation(mode="keep", clear_cache=False)
        if self.config.engine.device == "gpu":
            await self.llm.sleep(level=1, mode="keep")
        else:
            await self.llm.reset_prefix_cache(reset_running_requests=True)
            await self.llm.collective_rpc("free_kv_pages")

    async def wake_up(self, tags: list[str]) -> None:
        """Take memory again: `weights`, then, when they are new, `kv_cache`."""
        if self.config.engine.device == "gpu":
            await self.llm.wake_up(tags)

    async def resume(self) -> None:
        """Go on with the frozen requests; whatever old weights computed is computed again."""
        await self.llm.reset_prefix_cache(reset_running_requests=True)
        await self.llm.resume_generation()
        self._flights.is_frozen = False

    async def resident_bytes(self) -> int:
        """Resident memory of the process that holds the model."""
        return int((await self.llm.collective_rpc("resident_bytes"))[0])

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """First phase of vLLM's weight transfer, once for each trainer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    async def start_weight_update(self) -> None:
        """Second phase; from here to `finish` the weights are half-loaded."""
        await self.llm.start_weight_update()

    async def update_weights(self, update_info: Any) -> None:
        """Third phase, for each bucket."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))

    async def finish_weight_update(self, version: int) -> None:
        """Last phase: the weights are whole and carry this version."""
        await self.llm.finish_weight_update(str(version))

    async def version(self) -> int:
        """Optimiser steps behind the engine's weights."""
        return int(await self.llm.get_weight_version())

    async def canary(self, version: int) -> None:
        """Sample one token and prove which weights did it; WeightsError when they are others."""
        from vllm.sampling_params import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        prompt = {"prompt_token_ids": [0]}
        async for output in self.llm.generate(prompt, params, f"canary-{version}"):
            last = output
        found = [span.version for span in last.outputs[0].weight_versions or ()]
        if found != [str(version)]:
            raise WeightsError(f"the engine must answer with version {version}; it used {found}")


def server_arguments(config: Config) -> list[str]:
    """The `vllm serve` command line of this run."""
    model, engine = config.model, config.engine
    backend = "ipc" if engine.device == "gpu" else "lr_shared_memory"
    arguments = [
        f"--model={model.path}",
        f"--served-model-name={model.served_name}",
        f"--dtype={model.dtype}",
        f"--seed={config.seed}",
        f"--max-model-len={engine.max_model_len}",
        f"--max-num-seqs={engine.max_num_seqs}",
        "--logprobs-mode=processed_logprobs",
        f"--worker-extension-cls={_TRANSFER}.WorkerExtension",
        "--weight-transfer-config=" + json.dumps({"backend": backend}),
        "--disable-log-stats",
    ]
    if engine.device == "cpu":
        arguments.append("--enforce-eager")
    else:
        arguments.append("--enable-sleep-mode")
    if engine.kv_cache_bytes is not None:
        arguments.append(f"--kv-cache-memory-bytes={engine.kv_cache_bytes}")
    if model.chat_template is not None:
        arguments.append(f"--chat-template={model.chat_template}")
    if model.tool_parser is not None:
        arguments += ["--enable-auto-tool-choice", f"--tool-call-parser={model.tool_parser}"]
    if model.reasoning_parser is not None:
        arguments.append(f"--reasoning-parser={model.reasoning_parser}")
    return [*arguments, *engine.args]


def call_all(
    engines: Sequence[Any], method: str, *args: Any, timeout_s: float = 600.0
) -> list[Any]:
    """The answers of every engine to one method; EngineError names the one that fails."""
    refs = [getattr(engine, method).remote(*args) for engine in engines]
    return answers(refs, method, timeout_s=timeout_s)


def answers(refs: Sequence[Any], method: str, *, timeout_s: float) -> list[Any]:
    """What the engines answered to calls already made; EngineError names the one that failed."""
    deadline = time.monotonic() + timeout_s
    found = []
    for index, ref in enumerate(refs):
        try:
            found.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
        except LightningError:
            raise
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"engine/{index} died in `{method}`: {error}") from error
        except ray.exceptions.GetTimeoutError as error:
            raise EngineError(
                f"engine/{index} did not answer `{method}` within {timeout_s:.0f} s"
            ) from error
        except ray.exceptions.RayTaskError as error:
            raise EngineError(f"engine/{index} failed in `{method}`: {error.cause}") from error
    return found


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())
