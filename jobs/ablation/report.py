"""Tables and pictures from the rows of finished runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from jobs.ablation.arms import Row, Runs

Panel = tuple[str, str, Sequence[str]]
"""Title, key of the rows, arms; every panel has its arms in the order of the legend."""
COLOURS = ["#1f6fd1", "#e07b00", "#2a9d5c", "#b03a8c"]
LAST = 5
_WIDTH, _HEIGHT, _LEFT, _TOP = 300, 210, 42, 34
_PLOT_X, _PLOT_Y = _WIDTH - _LEFT - 10, _HEIGHT - _TOP - 34


def table(runs: Runs, others: Mapping[str, str]) -> str:
    """A line for each arm, means over the seeds with the range; others: title to key."""
    head = ["arm", "validation, last", f"mean of last {LAST}", "mean of all steps", *others]
    lines = [head, ["---"] * len(head)]
    for name, seeds in runs.items():
        validation = [[row["validation"] for row in rows] for rows in seeds]
        cells = [[v[-1] for v in validation], [np.mean(v[-LAST:]) for v in validation]]
        cells.append([np.mean(v[1:]) for v in validation])
        for key in others.values():
            values = [[row[key] for row in rows if key in row] for rows in seeds]
            cells.append([np.mean(v[-LAST:]) for v in values])
        lines.append(
            [name, *(f"{np.mean(c):.3f} ({min(c):.3f}–{max(c):.3f})" for c in cells)]  # noqa: RUF001
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(path: Path, runs: Runs, rows: Sequence[Sequence[Panel]], legend: Sequence[str]) -> None:
    """Panels in rows as an SVG: the mean over seeds as a line, their range as a band."""
    head = 18 * -(-len(legend) // 2) + 6
    width, height = _WIDTH * max(map(len, rows)), _HEIGHT * len(rows) + head
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for i, (label, colour) in enumerate(zip(legend, COLOURS, strict=False)):
        x, y = _LEFT + i % 2 * width // 2, 18 + i // 2 * 18
        parts.append(f'<path d="M{x} {y - 4}h18" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 23}" y="{y}">{label}</text>')
    for i, row in enumerate(rows):
        for j, panel in enumerate(row):
            parts.append(f'<g transform="translate({j * _WIDTH} {i * _HEIGHT + head})">')
            parts += [*_panel(panel, runs), "</g>"]
    path.write_text("\n".join([*parts, "</svg>\n"]))


def _panel(panel: Panel, runs: Runs) -> list[str]:
    title, key, names = panel
    curves = [_curve(runs[name], key) for name in names]
    top = np.ceil(4 * max(c[:, 3].max() for c in curves)) / 4
    bottom = 1.0 if key == "samples" else 0.0
    last = max(c[:, 0].max() for c in curves)

    def at(steps: np.ndarray, values: np.ndarray) -> str:
        x = _LEFT + steps / last * _PLOT_X
        y = _TOP + (top - values) / (top - bottom) * _PLOT_Y
        return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))

    parts = [f'<text x="{_LEFT}" y="{_TOP - 9}" font-weight="bold">{title}</text>']
    for value in np.linspace(bottom, top, 5):
        y = _TOP + (top - value) / (top - bottom) * _PLOT_Y
        parts.append(f'<path d="M{_LEFT} {y:.1f}h{_PLOT_X}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for step in range(0, int(last) + 1, 10):
        x, y = _LEFT + step / last * _PLOT_X, _TOP + _PLOT_Y + 15
        parts.append(f'<text x="{x:.1f}" y="{y}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{_LEFT - 5}" y="{_TOP + _PLOT_Y + 15}" text-anchor="end">step</text>')
    for curve, colour in zip(curves, COLOURS, strict=False):
        steps, mean, low, high = curve.T
        band = f"M{at(steps, low)}L{at(steps[::-1], high[::-1])}Z"
        parts.append(f'<path d="{band}" fill="{colour}" fill-opacity="0.13"/>')
        line = f'd="M{at(steps, mean)}" fill="none" stroke="{colour}" stroke-width="1.8"'
        parts.append(f"<path {line}/>")
    return parts


def _curve(seeds: Sequence[Sequence[Row]], key: str) -> np.ndarray:
    """[N, 4] step, mean, lowest and highest of a key over the seeds that have it."""
    found = defaultdict(list)
    for row in (row for rows in seeds for row in rows if key in row):
        found[row["step"]].append(row[key])
    return np.array([(s, np.mean(v), min(v), max(v)) for s, v in sorted(found.items())])
