"""Prints the size of the package against its goals; a report, no gate."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from pathlib import Path

GOAL_LINES, GOAL_MODULE, GOAL_FUNCTION = 3500, 300, 60
ROOT = Path(__file__).parent.parent / "lightning_ray"
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(source: str) -> int:
    """Lines that are neither blank, comment nor docstring."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for child in ast.iter_child_nodes(node):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if isinstance(node, _DOCUMENTED) and is_text and isinstance(child.value.value, str):
                strings |= set(range(child.lineno, child.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


def main() -> None:
    sizes: dict[str, int] = {}
    functions: list[tuple[int, str]] = []
    for path in sorted(ROOT.rglob("*.py")):
        source = path.read_text()
        name = str(path.relative_to(ROOT))
        sizes[name] = code_lines(source)
        functions += [
            (node.end_lineno - node.lineno + 1, f"{name}:{node.name}")
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
        ]
    print(f"== size: {sum(sizes.values())} code lines of a goal of {GOAL_LINES}")
    median = statistics.median(length for length, _ in functions)
    print(f"   {len(functions)} functions, median {median:.0f} lines with their docstrings")
    for name, lines in sizes.items():
        if lines > GOAL_MODULE:
            print(f"   over {GOAL_MODULE}: {name} {lines}")
    for length, name in functions:
        if length > GOAL_FUNCTION:
            print(f"   over {GOAL_FUNCTION}: {name} {length}")


if __name__ == "__main__":
    main()
