"""lightning-ray train | serve | show | export: what a person runs."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from lightning_ray.config import Config, load_config
from lightning_ray.credit import dead_signal
from lightning_ray.errors import LightningError, RecordError

console = Console(highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run it; the exit status."""
    parser = argparse.ArgumentParser(prog="lightning-ray", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, words in (("train", "train a policy"), ("serve", "gateway and engine alone")):
        command = commands.add_parser(name, help=words)
        command.add_argument("config", help="a YAML file (configs/)")
        command.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.lr=1e-5")
    show = commands.add_parser("show", help="runs, rollouts, one trajectory")
    show.add_argument("run", nargs="?", help="a run's folder, e.g. runs/quickstart")
    show.add_argument("--rollout", help="print this rollout's calls")
    show.add_argument("--explain", action="store_true", help="why its calls did not join")
    out = commands.add_parser("export", help="a run's trajectories or samples as Parquet")
    out.add_argument("run", help="a run's folder, e.g. runs/quickstart")
    out.add_argument("--what", choices=["samples", "trajectories"], default="samples")
    out.add_argument("--modes", nargs="+", choices=["train", "validate"], default=["train"])
    out.add_argument("--out", type=Path, help="a new folder; default: RUN/export/WHAT")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    try:
        if options.command == "show":
            return _show(options.run, options.rollout, explain=options.explain)
        if options.command == "export":
            return _export(Path(options.run), options.out, options.what, options.modes)
        config = load_config(options.config, options.overrides)
        return train(config) if options.command == "train" else serve(config)
    except LightningError as error:
        print(f"lightning-ray: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lightning-ray: stopped", file=sys.stderr)
        return 130


def train(config: Config) -> int:
    """Train until done, printing a line for each step."""
    import ray  # heavy: a wrong config is told without it

    from lightning_ray.run import started

    if config.harness is None or config.tasks is None:
        raise _missing(config)
    began_at = time.time()
    failure: LightningError | None = None
    with started(config, say=_say, loop=_train_loop) as parts:
        _say(f"gateway at {parts.base_url}")
        progress = _Progress(config)
        while not (done := ray.wait([parts.fitted], timeout=0.3)[0]):
            progress.print_new()
        progress.print_new()
        try:
            ray.get(done)
        except ray.exceptions.RayError as error:
            failure = _cause(error)
    _summarise(config, wall_s=time.time() - began_at)
    if failure is not None:
        raise failure
    return 0


def serve(config: Config) -> int:
    """Gateway and engine alone, until Ctrl-C; one JSON line says how to reach them."""
    import ray

    from lightning_ray.gateway.keys import Claims, sign
    from lightning_ray.run import started
    from lightning_ray.schema import Rollout, Task

    config = config.model_copy(update={"harness": None, "tasks": None})
    with started(config, say=lambda text: print(text, file=sys.stderr)) as parts:
        rollout = Rollout(
            rollout_id=uuid.uuid4().hex[:12], group_id="serve", step=0, attempt=0, mode="serve",
            task=Task(task_id="serve", data_json="{}"),
        )  # fmt: skip
        ray.get(parts.store.begin.remote(rollout))
        ray.get(parts.gate.open.remote())
        claims = Claims(rollout.rollout_id, 0, "serve", time.time() + 365 * 86400)
        line = {
            "base_url": f"{parts.base_url}/rollout/{rollout.rollout_id}/attempt/0",
            "api_key": sign(claims, secret=parts.secret),
            "model": config.model.served_name,
        }
        print(json.dumps(line), flush=True)
        while True:
            signal.pause()


def _train_loop(settings: dict[str, Any]) -> None:
    from lightning_ray.train.loop import train_loop  # heavy: only in the workers

    train_loop(settings)


def _cause(error: BaseException) -> LightningError:
    """The first error of ours in the chain, as our own class; else the error as it came."""
    worker_failures = getattr(error, "worker_failures", None) or {}
    for inner in (*worker_failures.values(), error):
        seen: BaseException | None = inner
        while seen is not None:
            found = getattr(seen, "cause", None)
            for candidate in (seen, found):
                if isinstance(candidate, LightningError):
                    return candidate
            seen = found if isinstance(found, BaseException) else seen.__cause__
    return LightningError(str(error))


def _missing(config: Config) -> LightningError:
    from lightning_ray.errors import ConfigError

    name = "harness" if config.harness is None else "tasks"
    return ConfigError(f"`{name}` is missing: training needs a harness and tasks; see configs/")


def _say(text: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", soft_wrap=True)


class _Progress:
    """Prints what the run's journal gains."""

    def __init__(self, config: Config) -> None:
        self.path = config.run_dir / "metrics.jsonl"
        self.num_steps = config.train.num_steps
        self._done = 0

    def print_new(self) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_text().splitlines(keepends=True)
        for line in lines[self._done :]:
            if not line.endswith("\n"):
                break
            _say(self._text(json.loads(line)))
            self._done += 1

    def _text(self, row: dict[str, float]) -> str:
        parts = [f"step {row['step']:>3}/{self.num_steps}"]
        if "rollout/reward_mean" in row:
            seconds = sum(value for name, value in row.items() if name.startswith("time/"))
            parts += [
                f"reward {row['rollout/reward_mean']:.3f}",
                f"mixed {row['rollout/mixed_groups_share']:.0%}",
                f"{row['call/num']:.0f} calls",
                f"gap {row.get('train/logprob_gap_mean', float('nan')):.1e}",
                f"{seconds:.1f} s (collect {row['time/collect_s']:.1f}, "
                f"update {row.get('time/update_s', 0):.1f}, "
                f"publish {row.get('time/publish_s', 0):.1f})",
            ]
            if reason := dead_signal(row):
                parts.append(f"[bold red]nothing to learn: {reason}[/bold red]")
            if row.get("sample/by_ray_data"):
                parts.append("samples by Ray Data")
        if "validation/reward" in row:
            parts.append(f"[bold]validation {row['validation/reward']:.3f}[/bold]")
        return "  ".join(parts)


def _summarise(config: Config, *, wall_s: float) -> None:
    """Write `summary.json` and print the curve."""
    path = config.run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    curve = [(row["step"], row["validation/reward"]) for row in rows if "validation/reward" in row]
    phases: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/"):
                phases[name.removeprefix("time/")] = (
                    phases.get(name.removeprefix("time/"), 0) + value
                )
    total = {
        name: sum(row.get(f"call/{name}", 0) for row in rows)
        for name in ("num", "num_prompt_tokens", "num_sampled_tokens")
    }
    summary = {
        "validation_reward_first": curve[0][1] if curve else None,
        "validation_reward_last": curve[-1][1] if curve else None,
        "num_steps": rows[-1]["step"] if rows else 0,
        "version": rows[-1]["version"] if rows else 0,
        "wall_s": wall_s,
        "phases": phases,
        "num_calls": total["num"] + sum(row.get("validation/num_calls", 0) for row in rows),
        "num_prompt_tokens": total["num_prompt_tokens"],
        "num_sampled_tokens": total["num_sampled_tokens"],
    }
    (config.run_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if not curve:
        return
    console.print("\nvalidation reward by step")
    for step, reward in curve:
        console.print(f"  {step:>4}  {reward:.3f}  [green]{'█' * round(reward * 50)}[/green]")
    console.print(f"\nfrom {curve[0][1]:.3f} to {curve[-1][1]:.3f} in {wall_s:.0f} s")
    console.print(f"run        {config.run_dir}")
    console.print(f"curves     tensorboard --logdir {config.run_dir / 'tensorboard'}")
    console.print(f"rollouts   lightning-ray show {config.run_dir}")


def _show(run: str | None, rollout: str | None, *, explain: bool) -> int:
    """Runs, or a run's rollouts, or one rollout's calls."""
    if run is None:
        for folder in sorted(Path("runs").glob("*/config.json")):
            console.print(str(folder.parent))
        return 0
    from lightning_ray.store import read_trajectories

    folder = _run_folder(run)
    trajectories = read_trajectories(folder / "store")
    if rollout is None:
        _show_rollouts(trajectories)
        return 0
    chosen = [t for t in trajectories if t.rollout.rollout_id == rollout]
    if not chosen:
        print(f"lightning-ray: no rollout `{rollout}` in {run}", file=sys.stderr)
        return 1
    from transformers import AutoTokenizer

    model = json.loads((folder / "config.json").read_text())["model"]["path"]
    show = _explain if explain else _show_trajectory
    show(chosen[0], AutoTokenizer.from_pretrained(model))
    return 0


def _export(run: Path, out: Path | None, what: str, modes: Sequence[str]) -> int:
    """Write Parquet files through Ray Data, into a folder that is not there yet."""
    folder = _run_folder(run).absolute()
    out = (out or folder / "export" / what).absolute()
    if out.exists():
        raise RecordError(f"`{out}` is there already; remove it or name another with --out")
    import ray

    from lightning_ray.assemble import export

    _say(f"reading {folder}")
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    try:
        num_rows = export(folder, out, what=what, modes=modes)
    finally:
        ray.shutdown()
    _say(f"{num_rows} {what} of {'/'.join(modes)} rollouts in {out}")
    return 0


def _run_folder(run: str | Path) -> Path:
    if not (Path(run) / "store").is_dir():
        raise RecordError(f"`{run}` is not a run's folder: it has no store/")
    return Path(run)


def _show_rollouts(trajectories: Sequence[Any]) -> None:
    table = Table(
        Column("rollout", min_width=14, no_wrap=True),
        "mode",
        "step",
        "task",
        "try",
        "calls",
        "tokens",
        "outcome",
        "reward",
    )
    for t in trajectories:
        outcome = t.outcome
        table.add_row(
            t.rollout.rollout_id, t.rollout.mode, str(t.rollout.step), t.rollout.task.task_id,
            str(t.rollout.attempt), str(len(t.calls)),
            str(sum(len(call.sampled_ids) for call in t.calls)),
            outcome.kind if outcome else "running",
            "-" if outcome is None or outcome.reward is None else f"{outcome.reward:.3f}",
        )  # fmt: skip
    console.print(table)


def _show_trajectory(trajectory: Any, tokenizer: Any) -> None:
    """The calls, then the samples they become: context dim, trained tokens green."""
    from lightning_ray.samples import build_samples

    rollout, outcome = trajectory.rollout, trajectory.outcome
    console.print(f"rollout {rollout.rollout_id}  {rollout.mode}  step {rollout.step}")
    console.print(f"task    {rollout.task.data_json}", markup=False)
    if outcome:
        console.print(
            f"outcome {outcome.kind}  reward {outcome.reward}  {outcome.message}", markup=False
        )
    for call in trajectory.calls:
        versions = sorted(set(call.versions.tolist()))
        console.print(
            f"call {call.index}  {call.dialect}  {call.kind}  {call.status}  "
            f"prompt {len(call.prompt_ids)}  sampled {len(call.sampled_ids)}  version {versions}  "
            f"{call.finish_reason}  {call.joined or ''}  {call.duration_s:.2f} s"
        )
    samples = build_samples(
        trajectory.calls, rollout_id=rollout.rollout_id, group_id=rollout.group_id
    )
    for index, sample in enumerate(samples):
        console.print(
            f"\nsample {index}: {len(sample.token_ids)} tokens, {sample.mask.sum()} trained"
        )
        for is_trained, ids in _runs(sample):
            style = "green" if is_trained else "dim"
            console.print(tokenizer.decode(ids), style=style, markup=False, end="")
        console.print()


def _explain(trajectory: Any, tokenizer: Any) -> None:
    """The tree, call by call: what each continues, and where and why it parts from the nearest."""
    from lightning_ray.samples import discarded, link

    unused = {call.index for call in discarded(trajectory.calls)}
    for place in link(trajectory.calls):
        call, nearest = place.call, place.nearest
        head = f"call {call.index}  {call.kind}  {call.thread or ''}  version "
        head += f"{sorted(set(call.versions.tolist()))}  {call.joined or ''}"
        console.print(head + ("  (its answer never came back)" if call.index in unused else ""))
        if nearest is None:
            console.print("  begins a sequence of its own")
        elif place.continues:
            console.print(
                f"  continues call {nearest.index}: {place.num_shared} tokens as they were"
            )
        else:
            console.print(f"  parts from call {nearest.index} after {place.num_shared} tokens")
            was = [*nearest.prompt_ids, *nearest.sampled_ids]
            for name, ids in (("was", was), ("is ", call.prompt_ids)):
                text = tokenizer.decode(ids[place.num_shared :][:12])
                console.print(f"    {name} {text!r}", markup=False)


def _runs(sample: Any) -> list[tuple[bool, list[int]]]:
    """Neighbouring tokens with the same mask, together."""
    runs: list[tuple[bool, list[int]]] = []
    for token_id, is_trained in zip(sample.token_ids.tolist(), sample.mask.tolist(), strict=True):
        if not runs or runs[-1][0] != is_trained:
            runs.append((is_trained, []))
        runs[-1][1].append(token_id)
    return runs


if __name__ == "__main__":
    sys.exit(main())
