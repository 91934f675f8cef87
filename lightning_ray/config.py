"""Every setting of a run, its default and its check. `load_config` is the only reader.

A run's YAML holds only what differs from the defaults; `key.sub=value` on the command line wins.
"""

from __future__ import annotations

import difflib
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from lightning_ray.errors import ConfigError, boundary
from lightning_ray.schema import OutcomeKind

Treatment = Literal["score", "mask", "retry"]


def _absolute(path: str) -> str:
    return str(Path(path).absolute())


LocalPath = Annotated[str, AfterValidator(_absolute)]
"""Made absolute when the config is read: workers have working directories of their own."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(_Section):
    """The model that is trained."""

    path: LocalPath
    """A Hugging Face model folder: weights, config, tokenizer, chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Of the engine and of the policy's weights."""
    served_name: str = "policy"
    """The name harnesses see; any name they send is mapped to it."""
    chat_template: LocalPath | None = None
    """A Jinja file that replaces the folder's own chat template."""
    tool_parser: str | None = "hermes"
    """vLLM's tool-call parser; None: tool calls stay text."""
    reasoning_parser: str | None = None
    """vLLM's reasoning parser."""


class EngineConfig(_Section):
    """What answers the calls."""

    count: int = Field(1, ge=1)
    """Engines; one for each bundle of the placement group."""
    device: Literal["cpu", "gpu"] = "gpu"
    """Where engines and policy run."""
    max_model_len: int = Field(8192, ge=16)
    """Tokens of prompt and answer together."""
    max_num_seqs: int = Field(64, ge=1)
    """Sequences decoded at once."""
    kv_cache_bytes: int | None = Field(None, ge=1 << 20)
    """Size of the KV cache; None: what vLLM finds free."""
    continuation: Literal["off", "exact", "keep_reasoning"] = "exact"
    """`exact`: a turn that comes back meaning what was sampled keeps its sampled tokens;
    `keep_reasoning`: also one whose reasoning the template or the harness took out."""
    args: list[str] = []
    """More arguments of `vllm serve`, as on its command line."""
    start_timeout_s: float = Field(600.0, gt=0)


class GatewayConfig(_Section):
    """Where harnesses call."""

    host: str = "127.0.0.1"
    """Address the gateway listens on."""
    port: int = Field(0, ge=0, le=65535)
    """0: a free one."""
    replicas: int = Field(1, ge=1)
    haproxy: bool = True
    """Ray Serve's HAProxy ingress, several times as fast as its Python proxy. It shows its
    statistics on two more ports, on every interface. A cluster's nodes need
    RAY_SERVE_ENABLE_HA_PROXY=1."""
    hold_s: float = Field(900.0, gt=0)
    """Longest a call waits while weights move, before it is told 503."""
    engine_s: float = Field(60.0, gt=0)
    """Longest a call waits for an engine that does not answer."""
    headers_s: float = Field(10.0, gt=0)
    """When the headers of a reply that is not ready leave, with the first keep-alive."""
    keep_alive_s: float = Field(4.0, gt=0)
    """Between keep-alives."""
    grace_s: float = Field(20.0, gt=0)
    """How long a call is sampled on after its harness has left: it may ask again."""
    reply: Literal["recorded", "live"] = "recorded"
    """`recorded`: a reply leaves when the whole of it is durable. `live`: a stream passes through
    as it comes, and only its end waits for the record."""


class HarnessConfig(_Section):
    """What makes the calls."""

    recipe: str
    """A YAML file that says how to run the program (configs/harness/)."""
    grader: str
    """`module:function`; called as function(task, workdir, stdout) after the harness has exited."""
    timeout_s: float = Field(600.0, gt=0)
    """Of one attempt, waiting for weights included."""
    grader_timeout_s: float = Field(60.0, gt=0)
    runners: int = Field(1, ge=1)
    """Ray actors that run harnesses."""
    slots: int = Field(16, ge=1)
    """Harness processes at once in one runner."""


class TasksConfig(_Section):
    """Where tasks come from."""

    train: str
    """`module:function` that returns the training tasks, a list of JSON objects."""
    validate_: str = Field(alias="validate")
    """The same, for the tasks that are only measured."""


class SamplingConfig(_Section):
    """How the engine samples, whatever a harness asks for."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0: all."""
    max_tokens: int = Field(1024, ge=1)
    """Upper limit of one answer, whatever the harness asks for."""


class CollectConfig(_Section):
    """How many rollouts, and what becomes of each ending."""

    groups: int = Field(8, ge=1)
    """Groups in one training step."""
    group_size: int = Field(8, ge=2)
    """Rollouts of one task in a group."""
    window: int | None = None
    """Groups kept running; above `groups`, unfinished ones carry over. None: `groups`."""
    max_attempts: int = Field(3, ge=1)
    max_age: int = Field(4, ge=0)
    """Steps a rollout may be behind before no new group starts."""
    assemble: Literal["inline", "ray_data"] = "inline"
    """Who makes samples of trajectories: every rank for itself, or Ray Data's tasks once."""
    inline_max_tokens: int = Field(50_000_000, ge=1)
    """Prompt tokens of a step's calls above which `inline` becomes `ray_data` by itself."""
    assemble_cpus: float = Field(4.0, gt=0)
    """CPUs that Ray Data may use for it,"""
    assemble_labels: dict[str, str] = {}
    """on nodes with these Ray labels."""
    assemble_timeout_s: float = Field(600.0, gt=0)
    """Longest that Ray Data may take for a step's samples."""
    sampling: SamplingConfig = SamplingConfig()
    validation_sampling: SamplingConfig = SamplingConfig(temperature=0.0)
    validation_size: int | None = None
    """Tasks of one validation; None: all."""
    treat: dict[OutcomeKind, Treatment] = {
        "ok": "score",
        "agent_failed": "score",
        "timeout": "mask",
        "context_overflow": "score",
        "harness_crash": "retry",
        "infra": "retry",
    }
    """What becomes of each kind of ending; a kind retried too often is masked."""

    @model_validator(mode="after")
    def _machinery_earns_no_reward(self) -> CollectConfig:
        for kind in ("harness_crash", "infra"):
            if self.treat.get(kind) == "score":
                raise ValueError(
                    f"collect.treat.{kind} must be mask or retry: a failure of the machinery never "
                    "becomes a reward; got score"
                )
        return self

    @model_validator(mode="after")
    def _window_holds_a_step(self) -> CollectConfig:
        if self.window is not None and self.window < self.groups:
            raise ValueError(
                f"collect.window must be at least collect.groups ({self.groups}), or a step could "
                f"never fill; got {self.window}. Leave it out to run in step."
            )
        return self


class ObjectiveConfig(_Section):
    """What is maximised; the formulas are in `train/loss.py`."""

    kind: Literal["ppo", "gspo", "cispo", "importance"] = "ppo"
    clip_low: float = Field(0.2, ge=0)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(None, gt=1)
    """ppo and gspo: a token's loss is at most so many times -A where A is negative."""
    mean: Literal["rollout_mean", "token_mean", "constant"] = "rollout_mean"
    """`rollout_mean`: over tokens, then rollouts; `token_mean`: over all tokens; `constant`: the
    sum over tokens, divided by rollouts x `constant_tokens` (Dr.GRPO)."""
    constant_tokens: int = Field(1024, ge=1)
    proximal: Literal["sampled", "recomputed"] = "sampled"
    """Log-probs the ratio is taken to: the engine's, or the policy's own before the step. The
    latter know nothing of how old a rollout is: with it, and `window` above `groups`, correct."""
    correction: Literal["off", "token", "rollout", "band"] = "off"
    """With `recomputed`: how tokens of another policy than the proximal one are weighted."""
    correction_low: float = Field(0.5, ge=0)
    correction_high: float = Field(2.0, gt=0)
    kl: float = Field(0.0, ge=0)
    """Weight of the divergence from the start model, which is then loaded beside the policy."""
    kl_kind: Literal["k3", "k1"] = "k3"

    @model_validator(mode="after")
    def _correction_has_two_policies(self) -> ObjectiveConfig:
        if self.correction != "off" and self.proximal == "sampled":
            raise ValueError(
                "train.objective.correction compares the sampled with recomputed log-probs; set "
                "train.objective.proximal=recomputed, or correction=off"
            )
        return self


class TrainConfig(_Section):
    """The optimiser and its schedule."""

    kinds: list[Literal["main", "subagent", "compaction", "title", "commit-message"]] = [
        "main", "subagent", "compaction",
    ]  # fmt: skip
    """Calls to learn from, by what they are for; the others are recorded only."""

    num_steps: int = Field(100, ge=0)
    num_workers: int | None = Field(None, ge=1)
    """Ranks; None: one for each engine."""
    lr: float = Field(1e-6, gt=0)
    """The highest learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    """Updates in which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it falls to `final_lr_share` of `lr` afterwards, until `num_steps`."""
    final_lr_share: float = Field(0.0, ge=0, le=1)
    gradient_clipping: float = Field(1.0, gt=0)
    zero_stage: Literal[0, 1, 2, 3] = 2
    offload: bool = False
    """Keep optimiser state and master weights in the host's memory while the engine runs."""
    tokens_per_batch: int = Field(16384, ge=1)
    """Padded tokens of one micro-batch."""
    layout: Literal["packed", "tree", "padded"] = "packed"
    """`packed`: a row holds several samples, which do not see each other; `tree`: and what they
    begin with alike is there once; `padded`: a row holds one."""
    max_sample_tokens: int | None = Field(None, ge=2)
    """Longest sample that is trained on; None: what the engine allows."""
    too_long: Literal["cut", "mask", "fail"] = "cut"
    """A longer one ends with the last whole turn that fits; or its rollout is left out; or the run
    stops."""
    frozen: list[str] = []
    """Patterns (`re.search`) of names of parameters that are not trained."""
    optimizer_steps: int = Field(1, ge=1)
    """Each takes its share of the step's rollouts."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline"] = "grpo"
    """How rewards become advantages; the formulas are in `credit.py`."""
    credit: str | None = None
    """`module:function` that gives credit within rollouts: called for each group as
    function(trajectories, advantages), it returns for each rollout its advantage, or a list with
    one for each of its calls."""
    objective: ObjectiveConfig = ObjectiveConfig()
    validate_every: int = Field(10, ge=0)
    """Steps; 0: only first and last."""
    save_every: int = Field(0, ge=0)
    """Steps between checkpoints; 0: only the last."""
    max_logprob_gap: float | None = None
    """Stop when the mean |log-prob(engine) - log-prob(policy)| of fresh tokens exceeds it."""
    drain_s: float = Field(30.0, ge=0)
    """How long running calls may finish before they are frozen at a token boundary."""

    @model_validator(mode="after")
    def _zero_holds_what_is_offloaded(self) -> TrainConfig:
        if self.offload and self.zero_stage not in (1, 2):
            raise ValueError(
                f"train.offload needs train.zero_stage 1 or 2; got {self.zero_stage} (DeepSpeed "
                "0.19 moves the states of 3 only for an optimiser of its own)"
            )
        return self


class SignalConfig(_Section):
    """Whether there is something to learn from."""

    enabled: bool = True
    """Check the start policy on the first step's groups before anything is learnt."""
    min_reward: float = 0.05
    max_reward: float = 0.60
    min_mixed: float = 0.30
    """Share of groups whose rewards differ."""
    max_barren_steps: int | None = Field(3, ge=0)
    """Steps in a row without anything to learn from before the run stops; None: it only says so."""


class Config(_Section):
    """One run."""

    name: str
    """The run's folder is `runs/<name>`."""
    runs: LocalPath = Field("runs", validate_default=True)
    """The folder of all runs."""
    track: list[Literal["tensorboard", "wandb", "mlflow"]] = ["tensorboard"]
    """Where metrics go beside `metrics.jsonl`; the last two are packages to be installed."""
    seed: int = 0
    model: ModelConfig
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    harness: HarnessConfig | None = None
    tasks: TasksConfig | None = None
    collect: CollectConfig = CollectConfig()
    train: TrainConfig = TrainConfig()
    signal: SignalConfig = SignalConfig()

    @property
    def run_dir(self) -> Path:
        """Where everything of the run is written."""
        return Path(self.runs) / self.name


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file with `key.sub=value` overrides; raises ConfigError."""
    try:
        tree = yaml.safe_load(Path(path).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"config `{path}` could not be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"config `{path}` is not YAML: {error}") from error
    for override in overrides:
        _override(tree, override)
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"config `{path}`: {_explain(error)}") from error


def load_function(spec: str, *, root: str) -> Callable[..., Any]:
    """The function a config names as `module:function`, looked up from `root`; else ConfigError."""
    if root not in sys.path:
        sys.path.append(root)
    module, _, name = spec.partition(":")
    with boundary(ConfigError, f"`{spec}` could not be imported", ImportError):
        function = getattr(importlib.import_module(module), name, None)
    if not callable(function):
        raise ConfigError(
            f"`{spec}` must be `module:function`; `{module}` has no function {name!r}"
        )
    return function


def _override(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError(f"override must be key.sub=value; got {override!r}")
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: `{parent}` holds a value, not settings")
    tree[last] = yaml.safe_load(value)


def _explain(error: ValidationError) -> str:
    """One line per fault: the key, what was expected, what was found."""
    lines = []
    for fault in error.errors():
        key = ".".join(str(part) for part in fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(
                f"`{key}` is no setting; remove it or mend its name{_nearest(fault['loc'])}"
            )
        elif fault["type"] == "missing":
            lines.append(f"`{key}` is missing")
        else:
            lines.append(f"`{key}`: {fault['msg']}; got {json.dumps(fault['input'], default=str)}")
    return "; ".join(lines)


def _nearest(loc: tuple[int | str, ...]) -> str:
    """A hint at the setting that was probably meant."""
    section: type[BaseModel] | None = Config
    for part in loc[:-1]:
        field = section.model_fields.get(str(part)) if section else None
        section = _section_of(field.annotation) if field else None
    names = list(section.model_fields) if section else []
    match = difflib.get_close_matches(str(loc[-1]), names, 1)
    return f" (did you mean `{match[0]}`?)" if match else ""


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
