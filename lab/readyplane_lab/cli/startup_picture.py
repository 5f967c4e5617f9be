"""A picture of where the time of starts goes: a waterfall for each group, on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from readyplane.core.errors import InvalidField
from readyplane.core.startup_report import StartGroup

WIDTH_IN, ROW_IN, HEAD_IN = 11.0, 0.28, 1.1


def draw(groups: Sequence[StartGroup], path: Path) -> None:
    """Write the PNG.

    Solid bars are a segment's time, hatched ones were modelled; the number is its mean exclusive
    share. Equal groups give equal files.

    Raises:
        InvalidField: the file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [len({s.name for s in g.typical.segments}) + 1 for g in groups]
    height = sum(ROW_IN * n + HEAD_IN for n in rows)
    figure, axes = plt.subplots(
        len(groups),
        1,
        figsize=(WIDTH_IN, height),
        sharex=True,
        squeeze=False,
        layout="constrained",
        height_ratios=rows,
    )
    colours = [mpl.colormaps["tab20"](i / 20 + 0.025) for i in range(20)]
    names = sorted({str(s.name) for g in groups for s in g.typical.segments})
    for axis, group in zip(axes[:, 0], groups, strict=True):
        start = group.typical
        first: dict[str, float] = {}
        for segment in start.segments:
            name = str(segment.name)
            first[name] = min(segment.start_s, first.get(name, segment.start_s))
        lines = sorted(first, key=lambda name: first[name])
        for segment in start.segments:
            name, end_s = str(segment.name), segment.end_s
            width_s = (start.wall_s if end_s is None else end_s) - segment.start_s
            axis.barh(
                lines.index(name),
                width_s,
                left=segment.start_s,
                color=colours[names.index(name) % len(colours)],
                hatch="//" if segment.modelled else None,
                edgecolor="black" if name == group.dominant else "none",
            )
        labels = [f"{name}  {group.exclusive_s.get(name, 0.0):.2f} s" for name in lines]
        labels.append(f"unexplained  {group.unexplained_s:.2f} s")
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.invert_yaxis()
        axis.axvline(start.wall_s, color="grey", linewidth=0.8)
        axis.set_title(
            f"{group.name}: {group.count} starts, T_ready P50 {group.p50_s:.2f} s, "
            f"P90 {group.p90_s:.2f} s, P99 {group.p99_s:.2f} s, longest {group.dominant}",
            loc="left",
            fontsize=9,
        )
    axes[-1, 0].set_xlabel("seconds since the order (hatched: modelled)")
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None}, format="png")
    except OSError as error:
        raise InvalidField(
            "--png", str(path), f"give a file that can be written ({error})"
        ) from error
    finally:
        plt.close(figure)
