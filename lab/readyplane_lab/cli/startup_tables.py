"""Tables of `readyplane startup report`: waterfalls, two groups beside each other, and what failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from readyplane_lab.cli import output
from readyplane_lab.cli.decisions import segments_table
from readyplane_lab.cli.startup_documents import start_document

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from readyplane.core.startup_failed import Failures
    from readyplane.core.startup_report import StartGroup

FAILURES_SHOWN_MAX = 12


def show_group(screen: Console, group: StartGroup) -> None:
    """Quantiles, the waterfall of a typical start, and the mean share of each segment."""
    from rich.markup import escape

    share = group.unexplained_s / group.mean_s if group.mean_s else 0.0
    seconds = {**group.exclusive_s, "unexplained": group.unexplained_s}[group.dominant]
    modelled = ", modelled" if group.dominant in group.modelled else ""
    screen.print(
        f"[bold]{escape(group.name)}[/bold]: {group.count} starts, T_ready "
        f"P50 {output.seconds(group.p50_s)}, P90 {output.seconds(group.p90_s)}, "
        f"P99 {output.seconds(group.p99_s)}\n"
        f"longest on average: [bold]{output.cell(group.dominant)}[/bold] {output.seconds(seconds)}{modelled} "
        f"of {output.seconds(group.mean_s)}; unexplained {output.seconds(group.unexplained_s)} "
        f"({output.share(share)})\n"
        f"{weights_line(group)}"
        f"{later_line(group)}"
        f"a typical start: {escape(group.typical.worker_id)}"
    )
    typical = start_document(group.typical)
    dominant = max(group.typical.exclusive_s, key=group.typical.exclusive_s.__getitem__, default="")
    screen.print(
        segments_table({**typical, "blocking_segment": None, "dominant_segment": dominant})
    )


def later_line(group: StartGroup) -> str:
    """What a typical start had done while it stood by, and what came once it served; else empty."""
    typical, text = group.typical, ""
    if typical.saved_s:
        text += f"done while it stood by: {output.seconds(typical.saved_s)} saved\n"
    if typical.upgraded_s is not None:
        text += f"all graphs {output.seconds(typical.upgraded_s)} after it was routable\n"
    return text


def weights_line(group: StartGroup) -> str:
    """The least time of the weights beside what they took (R7.1); empty where nobody measured."""
    found = group.weights
    if found is None:
        return ""
    return (
        f"weights on average: {found.size_bytes / 1e6:.1f} MB in {output.seconds(found.measured_s)}, "
        f"bound M/B_min {output.seconds(found.bound_s)}, efficiency {found.efficiency:.2f}\n"
    )


def difference_table(first: StartGroup, second: StartGroup, found: Sequence[Any]) -> Table:
    """Two groups, segment by segment."""
    columns = ("segment", output.cell(first.name), output.cell(second.name), "saved")
    made = output.table(*columns, right=columns[1:], title="mean exclusive seconds")
    for each in found:
        made.add_row(
            output.cell(each.segment),
            output.seconds(each.first_s),
            output.seconds(each.second_s),
            output.seconds(each.saved_s),
        )
    made.add_row(
        "[bold]T_ready[/bold]",
        output.seconds(first.mean_s),
        output.seconds(second.mean_s),
        output.seconds(first.mean_s - second.mean_s),
    )
    return made


def failures_table(found: Sequence[Failures]) -> Table:
    """Where starts ended and by which error; `found` is most frequent first."""
    from rich.markup import escape

    total = sum(each.count for each in found)
    title = f"{total} starts failed; they are in none of the figures above"
    made = output.table(
        "starts", "class, mode", "ended in", "error", right=("starts",), title=title
    )
    for each in found[:FAILURES_SHOWN_MAX]:
        kind = ", ".join(word or "?" for word in (each.worker_class, each.mode))
        made.add_row(str(each.count), escape(kind), output.cell(each.ended_in), escape(each.error))
    more = len(found) - FAILURES_SHOWN_MAX
    if more > 0:
        made.caption = f"and {more} more kinds (--json shows all)"
    return made
