"""Imports point down, each heavy library stays in its place, and pure modules need none of them."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_ray"

LAYERS = {
    0: ["schema", "config", "errors", "wire"],
    1: ["samples", "credit", "metrics", "train.batch", "train.loss", "train.attention"],
    2: ["gateway", "engine", "harness", "store", "assemble", "train.policy", "placement"],
    3: ["collect", "train.publish"],
    4: ["train.loop", "run"],
    5: ["cli"],
}
SIDEWAYS = {
    ("gateway.app", "store"),
    ("gateway.deploy", "store"),
    ("metrics", "samples"),
    ("assemble", "store"),
}
HOMES = {
    "ray.serve": ["gateway.deploy"],
    "vllm": ["engine.actor", "engine.capture", "engine.transfer"],
    "ray.data": ["assemble"],
    "ray.train": ["train.loop", "placement", "cli"],
    "deepspeed": ["train.policy"],
    "transformers": ["train.policy", "train.attention", "cli"],
    "kubernetes": ["harness.kubernetes"],
    "starlette": ["gateway.app"],
    "aiohttp": ["gateway.engines"],
}
PURE = ["schema", "config", "errors", "wire", "samples", "credit", "metrics", "train.batch",
        "gateway.keys", "gateway.gate", "gateway.dialects", "gateway.requests", "gateway.outgoing",
        "engine.continuation", "engine.flights", "engine.sessions", "harness.recipe"]  # fmt: skip
HEAVY = ["torch", "ray", "vllm", "deepspeed", "transformers"]


def modules() -> list[str]:
    return [
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "__init__.py"
    ]


def imports(module: str) -> set[str]:
    tree = ast.parse((PACKAGE / f"{module.replace('.', '/')}.py").read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def layer(module: str) -> int:
    for number, names in LAYERS.items():
        if any(module == name or module.startswith(f"{name}.") for name in names):
            return number
    raise AssertionError(f"{module} has no layer; give it one in {Path(__file__).name}")


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module: str) -> None:
    for name in imports(module):
        target = name.removeprefix("lightning_ray.")
        if target == name or target not in modules():
            continue
        same_package = "." in module and module.split(".")[0] == target.split(".")[0]
        down = layer(target) < max(layer(module), 1) or (module, target) in SIDEWAYS
        assert down or (same_package and layer(target) <= layer(module)), f"{module} -> {target}"


@pytest.mark.parametrize("library", HOMES)
def test_a_heavy_library_is_imported_in_its_place_only(library: str) -> None:
    homes = {
        module
        for module in modules()
        if any(name == library or name.startswith(f"{library}.") for name in imports(module))
    }
    assert homes <= set(HOMES[library])


def test_pure_modules_import_without_torch_ray_or_vllm() -> None:
    lines = "; ".join(f"import lightning_ray.{module}" for module in PURE)
    check = f"import sys; {lines}; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT)
    assert found.stdout.strip() == "[]", found.stderr


def test_no_cuda_package_is_in_the_cpu_install() -> None:
    lock = (ROOT / "requirements-cpu.lock").read_text().lower().splitlines()
    names = [line.split("==")[0] for line in lock if "==" in line]
    bad = [n for n in names if n.startswith(("nvidia-", "cuda-", "triton", "flashinfer"))]
    assert bad == []
    assert [line for line in lock if line.startswith("torch==")] == ["torch==2.13.0+cpu"]
    import importlib.metadata

    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    assert not {n for n in installed if n.startswith(("nvidia-", "cuda-", "triton"))}
