"""`readyplane trace info`: what a request trace holds, before it is replayed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from readyplane.core.errors import InvalidField
from readyplane_lab.cli import output
from readyplane_lab.cli.flags import Json, examples

if TYPE_CHECKING:
    from readyplane_lab.workload.trace import Trace

app = typer.Typer()
EXAMPLES = examples(
    "readyplane trace info azure2023_conv.csv.zst",
    "readyplane trace info mooncake_conversation.jsonl --json | jq .isl.p90",
)
QUANTILES = (0.5, 0.9, 0.99)
MINUTE_S = 60.0


@app.command("info", epilog=EXAMPLES)
def info(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Azure CSV or Mooncake JSONL, plain or .zst.")
    ],
    limit: Annotated[int, typer.Option(metavar="N", help="Only the first N lines; 0: all.")] = 0,
    json: Json = False,
) -> None:
    """Show a trace: format, span, rates, prompt and answer lengths, and prefix sharing."""
    if limit < 0:
        raise InvalidField("--limit", limit, "give 0 (all) or more")
    from readyplane_lab.workload.trace import read_trace

    if json:
        output.emit(trace_document(read_trace(file, limit=limit)))
        return
    with output.console(stderr=True).status(f"reading {file.name}"):
        facts = trace_document(read_trace(file, limit=limit))
    screen = output.console()
    rates, prefix = facts["rate"], facts["prefix"]
    screen.print(f"[bold]{output.cell(facts['name'])}[/bold]: {facts['format']} trace")
    screen.print(f"requests   {facts['requests']:,} in {_span(facts['span_s'])}")
    peak = rates["peak_minute_rps"]
    screen.print(
        f"rate       {output.number(rates['mean_rps'], 2)} requests/s on average"
        + (f", {peak:.2f} in the peak minute" if peak is not None else "")
    )
    screen.print(
        f"tokens     {output.number(rates['prompt_tokens_per_s'])} prompt tokens/s, "
        f"{output.number(rates['output_tokens_per_s'])} output tokens/s"
    )
    if prefix["ideal_hit"] is None:
        screen.print("prefixes   the trace does not say which prompts begin alike")
    else:
        screen.print(
            f"prefixes   {100 * prefix['ideal_hit']:.1f} % of prompt tokens were seen before "
            f"(an endless cache, whole blocks)"
        )
    if facts["note"]:
        screen.print(f"note       {output.cell(facts['note'])}")
    made = output.table("tokens", *_columns(), right=_columns())
    for key, label in (("isl", "prompt (ISL)"), ("osl", "answer (OSL)")):
        made.add_row(label, *(f"{facts[key][column]:,.0f}" for column in _columns()))
    screen.print(made)


def _columns() -> list[str]:
    return ["mean", "min", *(f"p{100 * q:g}" for q in QUANTILES), "max"]


def trace_document(trace: Trace) -> dict[str, Any]:
    """The facts of a trace; rates are null when its span is too short to tell."""
    import numpy as np

    at_s = np.array([r.at_s for r in trace.requests])
    isl = np.array([r.isl for r in trace.requests])
    osl = np.array([r.osl for r in trace.requests])
    span_s = trace.span_s
    minutes = Counter(int(second // MINUTE_S) for second in at_s)
    known = span_s > 0
    return {
        "name": trace.name,
        "format": trace.format,
        "requests": len(trace.requests),
        "span_s": span_s,
        "rate": {
            "mean_rps": len(at_s) / span_s if known else None,
            "peak_minute_rps": max(minutes.values()) / MINUTE_S if span_s >= MINUTE_S else None,
            "prompt_tokens_per_s": float(isl.sum()) / span_s if known else None,
            "output_tokens_per_s": float(osl.sum()) / span_s if known else None,
        },
        "isl": _lengths(isl),
        "osl": _lengths(osl),
        "prefix": {"ideal_hit": ideal_prefix_hit(trace)},
        "note": trace.note,
    }


def _lengths(values: Any) -> dict[str, float]:
    import numpy as np

    found = np.quantile(values, QUANTILES)
    return {
        "mean": float(values.mean()),
        "min": float(values.min()),
        **{f"p{100 * q:g}": float(v) for q, v in zip(QUANTILES, found, strict=True)},
        "max": float(values.max()),
    }


def ideal_prefix_hit(trace: Trace) -> float | None:
    """Share of prompt tokens that an endless cache of whole blocks would hold; None if unknown."""
    if trace.format == "azure":
        return None
    seen: dict[tuple[int, int, int], int] = {}
    hit = total = 0
    for request in trace.requests:
        parent, cached = -1, True
        total += request.isl
        for seed, length in request.parts:
            key = (parent, seed, length)
            cached = cached and key in seen
            hit += length if cached else 0
            parent = seen.setdefault(key, len(seen))
    return hit / total if total else None


def _span(seconds: float) -> str:
    if seconds < 2 * MINUTE_S:
        return f"{seconds:.1f} s"
    minutes = seconds / MINUTE_S
    return f"{minutes:.1f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
