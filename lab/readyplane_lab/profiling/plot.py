"""Curves and points as plain text, so that a profile can be looked at anywhere (pure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 64, 14
POINT, BOTH = "o", "*"


def plot(
    title: str,
    points: Sequence[tuple[float, float]],
    curves: Sequence[tuple[str, Callable[[float], float]]],
    *,
    x_label: str,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> list[str]:
    """Lines of text: measured points as `o`, each curve by its own mark, `*` where both meet.

    The x axis is logarithmic where the points span more than a factor of thirty. A curve is left
    out where it is beyond what was measured.
    """
    xs = [x for x, _ in points]
    low, high = min(xs), max(xs)
    log = low > 0 and high / low > 30.0

    def x_at(column: int) -> float:
        share = column / (width - 1)
        return low * (high / low) ** share if log else low + (high - low) * share

    def column_of(x: float) -> int:
        if high <= low:
            return 0
        share = math.log(x / low) / math.log(high / low) if log else (x - low) / (high - low)
        return round(share * (width - 1))

    values = [(mark, [f(x_at(c)) for c in range(width)]) for mark, f in curves]
    top = 1.1 * max(y for _, y in points) or 1.0
    grid = [[" "] * width for _ in range(height)]

    def row_of(y: float) -> int:
        return height - 1 - min(height - 1, max(0, round(y / top * (height - 1))))

    for mark, line in values:
        for column, y in enumerate(line):
            if y <= top:
                grid[row_of(y)][column] = mark
    for x, y in points:
        row, column = row_of(y), column_of(x)
        grid[row][column] = POINT if grid[row][column] in {" ", POINT} else BOTH
    lines = [title]
    for row, cells in enumerate(grid):
        shown = top * (height - 1 - row) / (height - 1)
        lines.append(f"{shown:9,.1f} |{''.join(cells).rstrip()}")
    lines.append(" " * 9 + " +" + "-" * width)
    ends = f"{low:,.0f}", f"{high:,.0f}{' (log)' if log else ''}"
    middle = x_label.center(width - len(ends[0]) - len(ends[1]))
    lines.append(" " * 11 + ends[0] + middle + ends[1])
    return lines
