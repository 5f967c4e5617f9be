"""The page of a proof: what it comes to, each input in detail, and what varies with what."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from readyplane_lab.proof.report.chart import Axes, Level, Series, draw
from readyplane_lab.proof.verdict import OURS

STYLE = Path(__file__).with_name("style.css")
CLAIRVOYANT = "clairvoyant"
DECISIONS_SHOWN = 60
MISS_FLOOR = 1e-4
"""Left edge of the Pareto charts: a run without a miss lies there."""


def page(document: Mapping[str, Any]) -> str:
    """The whole page as one text."""
    inputs = list(document["inputs"].values())
    centre = [one for one in inputs if one["about"]["centre"]]
    colours = _colours(inputs)
    body = [
        "<h1>Planner, baselines and the clairvoyant bound</h1>",
        (
            f'<p class="dim">Compared at {document["attainment"]:.1%} of all arrivals with both '
            "targets met; a refusal or a time-out is a miss; workers are billed from allocation to "
            "release.</p>"
        ),
        _undercut(document["undercut"]),
        _missed(document["missed"]),
        _tiles(document),
        f'<pre class="line">{escape(document["line"])}</pre>',
        _standings(centre, document["attainment"]),
        _single_knob(document),
        _curves(inputs, colours),
        "<h2>Inputs</h2>",
        *(_input(one, colours, document["attainment"]) for one in centre),
        _who(document),
        _skipped(document["skipped"] | document["faults"]),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Proof</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text()}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _colours(inputs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    names = dict.fromkeys(name for one in inputs for name in one["entries"])
    order = [OURS, *(name for name in names if name != OURS)]
    return {name: f"c{i % 10}" for i, name in enumerate(order)}


def _undercut(undercut: Sequence[str]) -> str:
    if not undercut:
        return ""
    rows = "".join(f"<li>{escape(why)}</li>" for why in undercut)
    return f'<p class="c1">The bound was undercut; do not trust this page.</p><ul>{rows}</ul>'


def _missed(missed: Sequence[str]) -> str:
    """Where our default does not keep the promise and somebody else does."""
    if not missed:
        return ""
    rows = "".join(f"<li>{escape(key)}</li>" for key in missed)
    return f"<h2>Missed by the planner's default policy</h2><ul>{rows}</ul>"


def percent(share: float) -> str:
    """Cut, not rounded: what is below a target never looks as if it were on it."""
    return f"{math.floor(share * 10_000 + 1e-9) / 100:.2f}%"


def _tiles(document: Mapping[str, Any]) -> str:
    said = {
        "r_median": "GPU-hours over O_SIM, median",
        "r_worst": "the same, worst input",
        "worst_vs_best_tuned": "over the best baseline, each tuned in hindsight, worst input",
        "worst_vs_one_knob": "over a baseline with one knob for all, median, worst baseline",
        "captured_servegen": "captured saving on ServeGen days",
        "reversals_per_h": "reversals per hour, worst replay",
        "wasted_starts": "starts that did not pay",
        "azure_code_ratio": "over static peak on Azure code",
    }
    figures = dict(part.split("=", 1) for part in document["line"].split()[1:])
    tiles = (
        f'<div class="tile"><b>{escape(figures[name])}</b><span>{text}</span></div>'
        for name, text in said.items()
        if name in figures
    )
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _standings(centre: Sequence[Mapping[str, Any]], attainment: float) -> str:
    names = list(dict.fromkeys(name for one in centre for name in one["entries"]))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = []
    for one in centre:
        best = min(
            (
                entry_hours(entry)
                for name, entry in one["entries"].items()
                if entry["reached"] and not entry["bound"]
            ),
            default=math.nan,
        )
        cells = "".join(_cell(one["entries"].get(name), best, attainment) for name in names)
        rows.append(
            f"<tr><td>{escape(one['about']['scenario'])}</td>"
            f"<td>{one['bound']['floor_gpu_hours']:.2f}</td>"
            f"<td>{one['bound']['lower_gpu_hours']:.2f}</td>"
            f"<td>{_osim(one)}</td>{cells}</tr>"
        )
    return (
        f"<h2>GPU-hours at {attainment:.1%}, each baseline at its best knob of this input, "
        "readyplane at its default</h2>"
        '<p class="dim">A contender that does not get there at any knob shows the attainment it '
        "does reach, or, in brackets, what the fluid mode has where it is too dear to be the best. "
        "The cheapest that is no bound is bold.</p>"
        f'<div class="wide"><table><tr><th>input</th><th>floor</th><th>O_LB</th><th>O_SIM</th>'
        f"{head}</tr>{''.join(rows)}</table></div>"
    )


def _osim(one: Mapping[str, Any]) -> str:
    fluid = one["bracket"].get("mode") == "fluid"
    return _number(one["bracket"]["osim_gpu_hours"]) + (" fluid" if fluid else "")


def _cell(entry: Mapping[str, Any] | None, best: float, asked: float) -> str:
    if entry is None:
        return "<td>-</td>"
    scores = chosen_scores(entry)
    if not entry["reached"]:
        return _unreached(entry, scores, asked)
    style = ' class="best"' if scores["gpu_hours"] <= best and not entry["bound"] else ""
    title = f"knob {entry['chosen']:g}, attainment {scores['attainment']:.2%}"
    return f'<td{style} title="{title}">{scores["gpu_hours"]:.2f}</td>'


def _unreached(entry: Mapping[str, Any], scores: Mapping[str, Any], asked: float) -> str:
    """No figure: either it misses, or the fluid mode has it out of reach of the cheapest."""
    title = f"knob {entry['chosen']:g}, {entry['mode']} mode"
    enough = [s["gpu_hours"] for s in entry["fluid"].values() if s["attainment"] >= asked]
    if entry["mode"] == "fluid" and enough:
        return f'<td class="dim" title="{title}, not confirmed">({min(enough):.2f})</td>'
    mark = "" if entry["mode"] == "event" else " fluid"
    return f'<td class="missed" title="{title}">{percent(scores["attainment"])}{mark}</td>'


def chosen_scores(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scores of a contender at the point that stands for it."""
    by_knob: Mapping[str, Mapping[str, Any]] = entry[entry["mode"]]
    return next(s for knob, s in by_knob.items() if float(knob) == entry["chosen"])


def entry_hours(entry: Mapping[str, Any]) -> float:
    """GPU-hours of a contender at its chosen knob."""
    return float(chosen_scores(entry)["gpu_hours"])


def _single_knob(document: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{found['knob']:g}</td>"
        f"<td>{_number(found['median_ratio'])}</td></tr>"
        for name, found in document["one_knob"].items()
    )
    if not rows:
        return ""
    return (
        "<h2>One knob for all inputs</h2>"
        '<p class="dim">Median of our GPU-hours over theirs on the inputs where both get there '
        "(fluid mode).</p>"
        "<table><tr><th>baseline</th><th>knob</th><th>ours over theirs</th></tr>"
        f"{rows}</table>"
    )


def _curves(inputs: Sequence[Mapping[str, Any]], colours: Mapping[str, str]) -> str:
    """Off the centre: cost over O_SIM against T_ready and peak, median over inputs."""
    charts = []
    for factor, title in (("t_ready_s", "T_ready, s"), ("peak", "workers at the peak")):
        series, reached = _factor(inputs, factor, colours)
        if any(len(one.points) > 1 for one in series):
            low, high = Axes(title, "GPU-hours over the bound"), Axes(title, "attainment")
            charts += [
                draw(series, Axes(low.x, low.y, log_x=True)),
                draw(reached, Axes(high.x, high.y, log_x=True, y_low=None, y_high=1.0)),
            ]
    if not charts:
        return ""
    return (
        "<h2>One factor at a time</h2>"
        '<p class="dim">Knobs as chosen at the centre point, fluid mode, median over the inputs; '
        "the bound is O_LB at that point. Cost falls as starts get faster.</p>"
        f'<div class="charts">{"".join(charts)}</div>'
    )


def _factor(
    inputs: Sequence[Mapping[str, Any]], factor: str, colours: Mapping[str, str]
) -> tuple[list[Series], list[Series]]:
    others = {"t_ready_s", "peak", "seed"} - {factor}
    centre = next((one["about"] for one in inputs if one["about"]["centre"]), None)
    if centre is None:
        return [], []
    line = [one for one in inputs if all(one["about"][o] == centre[o] for o in others)]
    cost: dict[str, dict[float, list[float]]] = {}
    share: dict[str, dict[float, list[float]]] = {}
    for one in line:
        lower = one["bound"]["lower_gpu_hours"]
        for name, entry in one["entries"].items():
            scores = next(
                (
                    s
                    for k, s in entry["fluid"].items()
                    if float(k) == (entry["chosen"] if name != OURS else one["about"]["default"])
                ),
                None,
            )
            if scores is None:
                continue
            at = float(one["about"][factor])
            share.setdefault(name, {}).setdefault(at, []).append(scores["attainment"])
            if lower > 0:
                cost.setdefault(name, {}).setdefault(at, []).append(scores["gpu_hours"] / lower)
    made = []
    for found in (cost, share):
        made.append(
            [
                Series(
                    name,
                    colours[name],
                    [(at, statistics.median(v)) for at, v in sorted(points.items())],
                )
                for name, points in found.items()
            ]
        )
    return made[0], made[1]


def _input(one: Mapping[str, Any], colours: Mapping[str, str], attainment: float) -> str:
    about, ours = one["about"], one["ours"]
    unexpected = one.get("unexpected")
    verdict = "not asked" if unexpected is None else "as expected"
    if unexpected:
        verdict = "not as expected: " + "; ".join(unexpected)
    parts = [
        f"<details><summary>{escape(about['scenario'])}: {escape(about['title'])}</summary>",
        f"<p>Expected: {escape(about['expected'])}<br>Planner: {escape(verdict)}.</p>",
        '<div class="charts">',
        _pareto(one, colours, attainment),
        *_pictures(ours["trace"], f"{OURS} at its default", colours[OURS], about),
    ]
    best = _best_baseline(one)
    for name in dict.fromkeys(n for n in (best, CLAIRVOYANT) if n in one["entries"]):
        entry = one["entries"][name]
        if entry["trace"] is not None:
            parts += _pictures(entry["trace"], name, colours[name], about)
    parts += ["</div>", _scores(one), _decisions(ours.get("decisions") or ()), "</details>"]
    return "".join(parts)


def _best_baseline(one: Mapping[str, Any]) -> str:
    found = [
        (entry_hours(entry), name)
        for name, entry in one["entries"].items()
        if entry["reached"] and not entry["bound"] and name != OURS
    ]
    return min(found)[1] if found else ""


def _pareto(one: Mapping[str, Any], colours: Mapping[str, str], attainment: float) -> str:
    series = []
    for name, entry in one["entries"].items():
        for mode, kind in (("fluid", "rings"), ("event", "dots")):
            rows = sorted(entry[mode].items(), key=lambda kv: kv[1]["gpu_hours"])
            series.append(
                Series(
                    name if mode == "fluid" else "",
                    colours[name],
                    [
                        (max(MISS_FLOOR, 1 - s["attainment"]), s["gpu_hours"] / _unit(one))
                        for _, s in rows
                    ],
                    kind,  # type: ignore[arg-type]
                    [
                        f"{name} {float(k):g} ({mode}): {s['attainment']:.2%}, "
                        f"{s['gpu_hours']:.2f} GPU-hours"
                        for k, s in rows
                    ],
                )
            )
    levels = [Level("O_LB", "c5", one["bound"]["lower_gpu_hours"] / _unit(one))]
    if one["bracket"]["osim_gpu_hours"]:
        levels.append(Level("O_SIM", "c0", one["bracket"]["osim_gpu_hours"] / _unit(one)))
    axes = Axes(
        f"share of arrivals missed (asked for: {1 - attainment:.3g} at most)",
        "GPU-hours over O_LB",
        x_low=MISS_FLOOR,
        x_high=1.0,
        y_high=3.5,
        log_x=True,
    )
    return draw(series, axes, levels=levels, height=300)


def _unit(one: Mapping[str, Any]) -> float:
    return float(one["bound"]["lower_gpu_hours"]) or 1.0


def _pictures(
    trace: Mapping[str, Sequence[float | None]], name: str, style: str, about: Mapping[str, Any]
) -> list[str]:
    """Both pools and the latencies of one run, on one time axis."""
    charts = []
    for pool in ("prefill", "decode"):
        series = [
            Series("needed", "c5", _points(trace, f"{pool}.need"), "area"),
            Series("paid for", "c3", _points(trace, f"{pool}.held"), "step"),
            Series("target", "c1", _points(trace, f"{pool}.target"), "step"),
            Series("ready", style, _points(trace, f"{pool}.ready"), "step"),
        ]
        charts.append(
            f"<div><h3>{escape(name)}: {pool}</h3>{draw(series, Axes('s', 'workers'))}</div>"
        )
    for key, label, target in (
        ("ttft.p90_s", "TTFT, P90, s", about["ttft_s"]),
        ("tpot.p90_s", "TPOT, P90, s", about["tpot_s"]),
    ):
        line = Series("", style, _points(trace, key))
        axes = Axes("s", label, y_high=3 * target)
        charts.append(
            f"<div><h3>{escape(name)}: {escape(label)}</h3>"
            f"{draw([line], axes, levels=[Level('target', 'c1', target)])}</div>"
        )
    return charts


def _points(
    trace: Mapping[str, Sequence[float | None]], key: str
) -> list[tuple[float, float] | None]:
    return [
        None if x is None or y is None else (x, y)
        for x, y in zip(trace["t_s"], trace.get(key, ()), strict=False)
    ]


SHOWN = {
    "attainment": "attained",
    "gpu_hours": "GPU-h",
    "boot_gpu_hours": "boot",
    "standby_gpu_hours": "standby",
    "drain_gpu_hours": "drain",
    "never_gpu_hours": "never served",
    "violation": "violation, tokens",
    "ttft_p99_s": "TTFT P99, s",
    "tpot_p99_s": "TPOT P99, s",
    "starts": "starts",
    "wasted": "wasted",
    "reversals_per_h": "reversals/h",
    "short_s": "short, s",
    "effect_s": "to effect, s",
}


def _scores(one: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in SHOWN.values())
    rows = []
    for name, entry in one["entries"].items():
        scores = chosen_scores(entry)
        cells = "".join(f"<td>{_number(scores.get(key))}</td>" for key in SHOWN)
        rows.append(f"<tr><td>{escape(name)} at {entry['chosen']:g}</td>{cells}</tr>")
    return f'<div class="wide"><table><tr><th></th>{head}</tr>{"".join(rows)}</table></div>'


def _decisions(decisions: Iterable[Mapping[str, Any]]) -> str:
    rows = [
        f"<tr><td>{_number(d['at_s'])}</td><td>{escape(d['summary'])}</td>"
        f"<td>{escape('; '.join(d['why']))}</td></tr>"
        for d in decisions
    ]
    if not rows:
        return ""
    more = f", the first {DECISIONS_SHOWN} of {len(rows)}" if len(rows) > DECISIONS_SHOWN else ""
    return (
        f'<h3>Decisions of the planner{more}</h3><table class="text">'
        "<tr><th>s</th><th>what</th><th>why</th></tr>"
        f"{''.join(rows[:DECISIONS_SHOWN])}</table>"
    )


def _who(document: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(c['title'])}</td><td>{escape(c['knob'])}</td>"
        f"<td>{escape(c['source'])}</td></tr>"
        for name, c in document["contenders"].items()
    )
    return (
        '<h2>Contenders</h2><table class="text"><tr><th>name</th><th>rule</th><th>knob</th><th>source</th>'
        f"</tr>{rows}</table>"
    )


def _skipped(skipped: Mapping[str, str]) -> str:
    if not skipped:
        return ""
    rows = "".join(f"<li>{escape(key)}: {escape(why)}</li>" for key, why in skipped.items())
    return f"<h2>Not run</h2><ul>{rows}</ul>"


def _number(value: float | str | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
