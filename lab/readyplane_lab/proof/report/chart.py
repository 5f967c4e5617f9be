"""Charts as SVG text: lines, steps and points on two axes, readable without a script.

Owns scales, ticks and marks. A series is a list of (x, y); a None in it breaks the line, because
what is not known is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

WIDTH, HEIGHT = 640, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 34
TICKS = 5


@dataclass(frozen=True, slots=True)
class Series:
    """One line or set of points.

    Attributes:
        name: in the legend; empty for none. style: CSS class of its stroke and fill.
        points: (x, y) or None for a gap. kind: how it is drawn. titles: shown over each point.
    """

    name: str
    style: str
    points: Sequence[tuple[float, float] | None]
    kind: Literal["line", "step", "dots", "rings", "area"] = "line"
    titles: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Axes:
    """What the axes say and where they end; None: as the data has it, with zero below.

    Attributes:
        log_x: a logarithmic x axis; values at or below zero lie on its left edge.
    """

    x: str
    y: str
    x_low: float | None = None
    x_high: float | None = None
    y_low: float | None = 0.0
    y_high: float | None = None
    log_x: bool = False


@dataclass(frozen=True, slots=True)
class Level:
    """A horizontal line over the whole width, such as a target."""

    name: str
    style: str
    at: float


class _Scale:
    def __init__(self, low: float, high: float, begin: float, end: float, *, log: bool) -> None:
        self.log = log
        self.low = math.log10(max(low, 1e-12)) if log else low
        self.high = math.log10(max(high, 1e-12)) if log else high
        if self.high <= self.low:
            self.high = self.low + 1.0
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        if self.log:
            value = math.log10(value) if value > 0 else self.low
        share = (value - self.low) / (self.high - self.low)
        return self._begin + min(1.0, max(0.0, share)) * (self._end - self._begin)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(self.low), math.ceil(self.high)
            marks = (1,) if last - first > TICKS // 2 else (1, 2, 5)
            every = [m * 10.0**k for k in range(first, last + 1) for m in marks]
            return [v for v in every if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
        step = _round_step((self.high - self.low) / TICKS)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [k * step for k in range(first, last + 1)]


def draw(
    series: Sequence[Series],
    axes: Axes,
    *,
    levels: Sequence[Level] = (),
    width: int = WIDTH,
    height: int = HEIGHT,
) -> str:
    """One chart with its legend, as an SVG element; a note where there is nothing to draw."""
    points = [p for one in series for p in one.points if p is not None]
    points = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if not points:
        return '<p class="none">nothing to draw</p>'
    xs = [p[0] for p in points if not axes.log_x or p[0] > 0] or [1.0]
    ys = [p[1] for p in points] + [level.at for level in levels]
    x = _Scale(
        min(xs) if axes.x_low is None else axes.x_low,
        max(xs) if axes.x_high is None else axes.x_high,
        LEFT,
        width - RIGHT,
        log=axes.log_x,
    )
    low = min(ys) if axes.y_low is None else axes.y_low
    high = max(ys) * 1.05 if axes.y_high is None else axes.y_high
    y = _Scale(low, high, height - BOTTOM, TOP, log=False)
    parts = [
        (
            f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(axes.y)} over '
            f'{escape(axes.x)}">'
        )
    ]
    parts += _grid(x, y, axes, width, height)
    for level in levels:
        at = y.at(level.at)
        parts.append(
            f'<line class="level {level.style}" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" '
            f'y2="{at:.1f}"><title>{escape(level.name)} {level.at:.4g}</title></line>'
        )
    for one in series:
        parts += _marks(one, x, y)
    parts.append("</svg>")
    named = [(one.name, one.style) for one in series if one.name]
    named += [(f"{level.name} {level.at:.3g}", level.style) for level in levels if level.name]
    keys = "".join(
        f'<span class="key"><i class="{style}"></i>{escape(name)}</span>' for name, style in named
    )
    return f"<figure>{''.join(parts)}<figcaption>{keys}</figcaption></figure>"


def _grid(x: _Scale, y: _Scale, axes: Axes, width: int, height: int) -> list[str]:
    parts = []
    for tick in x.ticks():
        at = x.at(tick)
        parts.append(
            f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
            f'<text x="{at:.1f}" y="{height - BOTTOM + 14}" text-anchor="middle">{tick:g}</text>'
        )
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    middle = (LEFT + width - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle:.0f}" y="{height - 4}" text-anchor="middle">'
        f"{escape(axes.x)}</text>"
    )
    parts.append(
        f'<text class="axis" transform="translate(12 {(TOP + height - BOTTOM) / 2:.0f}) '
        f'rotate(-90)" text-anchor="middle">{escape(axes.y)}</text>'
    )
    return parts


def _marks(one: Series, x: _Scale, y: _Scale) -> list[str]:
    if one.kind in {"dots", "rings"}:
        out = []
        for i, point in enumerate(one.points):
            if point is None:
                continue
            title = escape(one.titles[i]) if i < len(one.titles) else ""
            out.append(
                f'<circle class="{one.kind} {one.style}" cx="{x.at(point[0]):.1f}" '
                f'cy="{y.at(point[1]):.1f}" r="4"><title>{title}</title></circle>'
            )
        return out
    runs: list[list[tuple[float, float]]] = [[]]
    for point in one.points:
        if point is None or not math.isfinite(point[1]):
            runs.append([])
        else:
            runs[-1].append((x.at(point[0]), y.at(point[1])))
    out = []
    for run in runs:
        if not run:
            continue
        path = _path(run, step=one.kind in {"step", "area"})
        if one.kind == "area":
            ground = y.at(y.low)
            path += f"V{ground:.1f}H{run[0][0]:.1f}Z"
        out.append(f'<path class="{one.kind} {one.style}" d="{path}"/>')
    return out


def _path(run: Sequence[tuple[float, float]], *, step: bool) -> str:
    path = f"M{run[0][0]:.1f} {run[0][1]:.1f}"
    for px, py in run[1:]:
        path += f"H{px:.1f}V{py:.1f}" if step else f"L{px:.1f} {py:.1f}"
    return path


def _round_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    if rough <= 0 or not math.isfinite(rough):
        return 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * k for k in (1, 2, 5, 10) if power * k >= rough - 1e-12)
