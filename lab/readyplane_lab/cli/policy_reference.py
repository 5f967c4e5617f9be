"""docs/policy.md: every field of the policy with its type, bounds, default and meaning.

`python -m readyplane_lab.cli.policy_reference > docs/policy.md` prints it. Types, bounds and defaults
come from the schema; owns one sentence for each field. A tidy test finds a field without a sentence,
a sentence without a field, and a page that is not fresh.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from readyplane_planner.policy import Policy

HEAD = """# The policy

This page is made from the schema by `python -m readyplane_lab.cli.policy_reference > docs/policy.md`.

A policy says what is wanted of one model's fleet.
Every field has a default that works; only `model` must be given.
Seconds, tokens, workers and shares, as the names say; `null` means what the row says, never zero.

```yaml
model: llama-8b
slo: {ttft_s: 2.0, tpot_s: 0.05}
prefill: {min: 1, max: 8}
decode: {min: 1, max: 8}
```

It is hot: a change is in force from the next tick, which comes at once.
Each version is kept in the journal, and each decision names the version and the digest that it followed.
A wrong field changes nothing: the error names the field, the value and what to write instead.

| how | what |
|---|---|
| `python -m readyplane_planner --policy FILE` | read at start, and again whenever the file changes; a wrong one is named in the state and the last good one stays |
| `readyplane policy set FILE` | the fields of the file are changed, the others stay; `--whole` resets them |
| `readyplane policy set KEY=VALUE…` | single fields by their dotted names |
| `readyplane policy show` | the policy in force, with targets that cannot be reached |
| `readyplane plan --what-if policy.KEY=VALUE` | what would be decided under another policy, without setting it |
| `GET`, `PUT`, `PATCH /v1/policy` | the same over REST; `If-Match` makes it compare-and-set |
"""
TAIL = """## Checked across fields

`min` is no more than `max`, and the budget covers both minima.
A cooldown is no shorter than the look-back of the rates, or one step of load changes the direction twice.
A profile describes the class it is given for, and the quantiles of the prior are in order.
A target that no number of workers reaches, by the profiles and the prior lengths, is kept and flagged `target_unreachable` with the best that can be had.
"""
POOL = "pool"
TEXTS: dict[str, str] = {
    "model": "what is served",
    "manifest": "tag, digest or model name of the artifact for new workers, empty for the model's name; another digest begins a roll-out",
    "slo.ttft_s": "target of the time to the first token",
    "slo.tpot_s": "target of the time between two tokens of an answer",
    "slo.quantile": "share of the requests that shall meet the TTFT target",
    "slo.attainment": "the promise: share of all requests that shall meet both targets; both pools "
    "are sized by it, and what was missed moves how surely",
    "pool.min": "fewest workers, whatever the load",
    "pool.max": "most workers",
    "pool.spare": "workers kept beyond the need, for those that may be lost",
    "pool.fallback": "workers kept while rates have been unknown for `fallback_after` ticks; 0 for no more than `min`",
    "pool.standby": "workers kept beside the pool, which serve soon when it grows; they are paid for and are not among `max`",
    "pool.standby_holds": "what a standby holds: `weights` (everything, gate passed: serves within a second), `process` (an engine process that has imported everything and has neither weights nor device memory) or `asleep` (gate passed, device given back)",
    "pool.worker_class": "class that is started, and in whose workers the pool is sized",
    "pool.profile": "what a worker of that class can do: a shipped name or a `.json` file",
    "pool.classes": "where workers of several classes may be started; empty for the one above",
    "pool.classes.worker_class": "name of the class",
    "pool.classes.profile": "its profile: a shipped name or a `.json` file",
    "pool.classes.price": "of one GPU for an hour; null for the profile's",
    "pool.classes.min": "fewest workers of this class",
    "pool.classes.max": "its quota; null for no limit but the pool's",
    "decode.convertible": "new decode workers also take prompts, in short chunks; they are lent to a prefill pool that is slower still, and nobody counts on them for it",
    "tick_s": "time between decisions",
    "forecast_quantile": "share of the coming horizons whose largest demand shall stay below the forecast's bound",
    "headroom": "share added to demand before workers are counted",
    "forecast.window_s": "look-back of a rate; null for 10 s, or the shorter of the cooldowns",
    "forecast.warmup_s": "until then nothing shrinks and no forecast is scored",
    "forecast.prior_margin": "bound over expectation, as a share at a horizon of 60 s, until forecasts were scored",
    "forecast.aci_step": "how fast misses correct the bound",
    "forecast.season.mode": "`prewarm`: a rise that came at this time on the days before raises a target early; `off`: nothing rests on the time of day",
    "forecast.season.ahead_s": "how far ahead is looked; null for twice the P90 of T_ready and a quarter of an hour",
    "forecast.season.extra_max": "workers of a pool beyond what the forecast needs, at most",
    "forecast.season.days_min": "days that must have been seen",
    "forecast.season.skill_min": "share of what the rate of an hour ago misses that the pattern must have saved lately",
    "load.combine": "how predicted and measured latency make a load: the larger, weighted, or the prediction alone",
    "load.actual_weight": "weight of the measured one for `weighted`",
    "load.samples_min": "requests that a measured latency rests on, or it counts as unknown",
    "load.window_s": "longest window of a measured latency: a load must not tell of what has passed",
    "up.cooldown_s": "pause between two steps of growing",
    "up.max_step": "workers a step",
    "up.pending_max": "workers on their way at once",
    "up.hold_s": "what eats only into the headroom has lasted that long before it grows",
    "down.cooldown_s": "pause between two steps of shrinking",
    "down.max_step": "workers a step",
    "down.window_s": "the largest want of that window counts",
    "down.hold_s": "surplus has lasted that long; null for T_ready plus a drain, as measured",
    "down.band": "share of demand that must fit on top before anything shrinks",
    "catch_up_s": "a backlog is cleared within that time, or half of T_ready if that is longer",
    "handover_s": "what every request pays between prefill and decode",
    "min_ready_s": "a worker serves that long before it may be drained",
    "flip": "where one pool shrinks while the other grows, workers change the stage, if their engine can, instead of ending and starting",
    "warm_worker_s": "a worker's speed is not learned from before that",
    "eta_bound_factor": "a start is given up after so many P99 of T_ready",
    "orphan_s": "an allocation without a lease, or without progress, is given back after that",
    "backoff_s": "first pause after a failed or refused start; it doubles",
    "t_ready_prior.p50_s": "median of order to ready, until starts were measured",
    "t_ready_prior.p90_s": "its P90",
    "t_ready_prior.p99_s": "its P99",
    "prior_lengths.isl": "mean prompt tokens, until requests were seen",
    "prior_lengths.osl": "mean output tokens, until requests were seen",
    "drain_deadline_s": "a drain may take that long",
    "budget_gpus": "of both pools, draining workers included; null for none",
    "graph_stages": "workers are ready with few graphs, and capture the others while they serve",
    "start_mode": "how engines get their code; `auto` takes for each start what costs least over its expected life",
    "nodes": "where workers may start, for a preference among them; empty for anywhere",
    "nodes.name": "name of the machine",
    "nodes.gpus": "its GPUs",
    "nodes.classes": "classes that it holds; empty for any",
    "rollout.surge": "workers of each pool that start beside those it shall have",
    "rollout.pause_on": "what a person decides about: `attainment` (it does worse), `starts` (they fail), `unknown` (no evidence and no progress); what is not named is rolled back at once",
    "rollout.rollback_below": "it does worse when its share of attained requests is surely below that part of the old one's",
    "rollout.verify_s": "the new generation serves alone that long before the roll-out is done",
    "rollout.samples_min": "requests that make a share; 0 asks for none",
    "rollout.starts_failed_max": "starts that fail in a row",
    "rollout.patience_s": "without evidence and progress for that long counts as `unknown`",
    "rollout.asked": "the last wish of a person; `readyplane rollout` writes it",
    "rollout.asked.id": "of the wish, so that it is followed once",
    "rollout.asked.action": "what is wanted",
    "rollout.asked.by": "who asked",
    "rollout.asked.at_s": "when, in seconds since the epoch",
    "degradation.mode": "`shed` has the router refuse the least important requests while more than `late_max` of all would be late; `off` leaves them to its queue. Requests of one priority are never touched",
    "degradation.late_max": "share of the requests predicted to be late, above which the least important give way; the order aims at half of it, and ends there",
    "degradation.ttl_s": "an order lasts that long unless it is renewed, which each tick does; no shorter than three ticks",
    "degradation.protect_from": "that priority and more are never refused; null protects the highest that is present alone",
    "fallback_after": "ticks with unknown rates before the `fallback` of the pools holds",
    "hand_hold_s": "a number of workers that a person set by hand is left alone for that long",
    "optimiser": "what proposes targets: `size`, `tuned`, or one that a package offers; the guard judges whatever it proposes",
    "advisory": "decide, record and show, but order, drain and release nothing",
    "paused": "hold both targets where they are, even below the floor",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One field as the page shows it; `key` is that of its sentence."""

    name: str
    key: str
    kind: str
    default: str


def rows() -> list[Row]:
    """Every field that takes a value, in the order of the schema."""
    return list(_rows(Policy, "", ""))


def _rows(model: type[BaseModel], path: str, key: str) -> Iterator[Row]:
    for name, info in model.model_fields.items():
        here, text = f"{path}{name}", f"{key}{name}"
        below, many = _model_of(info.annotation)
        if below is None:
            yield Row(here, text, _kind(info), _default(info))
            continue
        if many or info.default is None:
            yield Row(here, text, "list" if many else "object", _default(info))
        inner = f"{here}[]." if many else f"{here}."
        yield from _rows(below, inner, _key_of(text))


def _key_of(text: str) -> str:
    """Both pools share their sentences, but for what only one of them has."""
    if text in {"prefill", "decode"}:
        return f"{POOL}."
    return f"{text}."


def _model_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """(the model inside, whether there are many of it)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part, get_origin(annotation) in {list, tuple}
    return None, False


def _kind(info: FieldInfo) -> str:
    annotation, metadata = info.annotation, list(info.metadata)
    empty = False
    if get_origin(annotation) in {Union, types.UnionType}:
        parts = get_args(annotation)
        empty = type(None) in parts
        annotation = next(p for p in parts if p is not type(None))
        for part in getattr(annotation, "__metadata__", ()):
            metadata += getattr(part, "metadata", [])
        annotation = getattr(annotation, "__origin__", annotation)
    if get_origin(annotation) is Literal:
        shown = ", ".join(f"`{value}`" for value in get_args(annotation))
    elif get_origin(annotation) in {list, tuple}:
        shown = "list of " + _word(get_args(annotation)[0])
    else:
        shown = _word(annotation) + _bounds(metadata)
    return f"{shown} or null" if empty else shown


def _word(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    return {bool: "true or false", int: "whole number", float: "number", str: "text"}[annotation]


def _bounds(metadata: list[Any]) -> str:
    low = high = ""
    for bound in metadata:
        if isinstance(bound, Ge):
            low = f"from {_number(bound.ge)}"
        elif isinstance(bound, Gt):
            low = f"above {_number(bound.gt)}"
        elif isinstance(bound, Le):
            high = f"to {_number(bound.le)}"
        elif isinstance(bound, MaxLen):
            high = f"of {bound.max_length} letters at most"
        elif isinstance(bound, MinLen) and bound.min_length:
            low = "not empty"
    joint = ", " if high.startswith("of ") else " "
    shown = joint.join(part for part in (low, high) if part)
    return f", {shown}" if shown else ""


def _number(value: Any) -> str:
    return f"{value:,.10g}" if isinstance(value, int | float) else str(value)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "needed"
    value = info.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return "empty" if value == "" else f"{value:g}" if isinstance(value, float) else str(value)


def reference() -> str:
    """The whole page as Markdown, one sentence a line."""
    sections: dict[str, list[str]] = {}
    for row in rows():
        section = row.name.partition(".")[0].removesuffix("[]") if "." in row.name else ""
        text = TEXTS.get(row.key) or TEXTS[row.key.replace(f"{POOL}.", "decode.", 1)]
        line = f"| `{row.name}` | {row.kind} | {row.default} | {text} |"
        sections.setdefault(section, []).append(line)
    parts = [HEAD]
    for section, lines in sections.items():
        title = f"`{section}`" if section else "Of the whole fleet"
        parts.append(f"## {title}\n\n| field | value | default | meaning |\n|---|---|---|---|")
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, TAIL])


if __name__ == "__main__":
    print(reference(), end="")
