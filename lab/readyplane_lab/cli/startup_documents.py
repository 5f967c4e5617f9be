"""Starts and groups of starts as JSON: what `startup report --json` writes and `--from` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.startup import Segment, SegmentName
from readyplane.core.startup_failed import NOWHERE, FailedStart
from readyplane.core.startup_report import Start, StartGroup
from readyplane.core.weight_bound import WeightBound


def read_report(path: Path) -> tuple[list[Start], list[FailedStart]]:
    """The starts of a report that `--json` wrote, and those that failed.

    Raises:
        InvalidField: names the file.
    """
    try:
        document = json.loads(path.read_text())
        started = [start_of(start) for start in document["starts"]]
        return started, [failed_of(each) for each in document.get("failed", ())]
    except OSError as error:
        raise InvalidField("--from", str(path), f"give a readable file ({error})") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        remedy = f"give what `startup report --json` wrote ({error!r})"
        raise InvalidField("--from", str(path), remedy) from error


def start_of(document: Mapping[str, Any]) -> Start:
    """A start from its document; what is not there is not known."""
    segments = tuple(
        Segment(
            SegmentName(s["name"]),
            float(s["start_s"]),
            None if s["end_s"] is None else float(s["end_s"]),
            bool(s["modelled"]),
            str(s.get("detail", "")),
            float(s.get("saved_s", 0.0)),
        )
        for s in document["segments"]
    )
    upgrade = document.get("upgrade") or {}
    upgraded_s = upgrade.get("seconds") if upgrade.get("state") == "complete" else None
    return Start(
        worker_id=str(document["worker_id"]),
        wall_s=float(document["wall_s"]),
        exclusive_s={str(n): float(v) for n, v in document["exclusive_s"].items()},
        unexplained_s=float(document["unexplained_s"] or 0.0),
        segments=segments,
        upgraded_s=None if upgraded_s is None else float(upgraded_s),
        **{
            name: str(document.get(name) or "") for name in ("worker_class", "tier", "mode", "pool")
        },
        from_standby=bool(document.get("from_standby")),
    )


def failed_of(document: Mapping[str, Any]) -> FailedStart:
    """A failed start from its document, or from a start of an explanation."""
    after_s = document.get("wall_s")
    return FailedStart(
        worker_id=str(document["worker_id"]),
        ended_in=str(document.get("ended_in") or NOWHERE),
        error=str(document.get("failure") or document.get("note") or "no reason given"),
        after_s=None if after_s is None else float(after_s),
        **{name: str(document.get(name) or "") for name in ("worker_class", "mode", "pool")},
    )


def failed_document(failed: FailedStart) -> dict[str, Any]:
    """A failed start as JSON; `failed_of` reads it."""
    names = ("worker_id", "worker_class", "mode", "pool", "ended_in")
    return {
        **{name: getattr(failed, name) for name in names},
        "failure": failed.error,
        "wall_s": failed.after_s,
    }


def start_document(start: Start) -> dict[str, Any]:
    """A start as JSON; `start_of` reads it."""
    return {
        **{n: getattr(start, n) for n in ("worker_id", "worker_class", "tier", "mode", "pool")},
        "temperature": start.temperature or None,
        "from_standby": start.from_standby,
        "wall_s": start.wall_s,
        "exclusive_s": dict(start.exclusive_s),
        "unexplained_s": start.unexplained_s,
        "segments": [
            {
                "name": str(s.name),
                "start_s": s.start_s,
                "end_s": s.end_s,
                "modelled": s.modelled,
                "detail": s.detail,
                "saved_s": s.saved_s,
            }
            for s in start.segments
        ],
        "saved_s": start.saved_s,
        "upgrade": None
        if start.upgraded_s is None
        else {"state": "complete", "seconds": start.upgraded_s},
    }


def group_document(group: StartGroup) -> dict[str, Any]:
    """A group as JSON."""
    numbers = ("count", "p50_s", "p90_s", "p99_s", "mean_s", "unexplained_s", "dominant")
    return {
        "name": group.name,
        **{name: getattr(group, name) for name in numbers},
        "exclusive_s": dict(group.exclusive_s),
        "modelled": sorted(group.modelled),
        "weights": None if group.weights is None else weights_document(group.weights),
        "typical": group.typical.worker_id,
    }


def weights_document(found: WeightBound) -> dict[str, float]:
    """The bound of R7.1 beside what was measured."""
    numbers = ("size_bytes", "bound_s", "measured_s", "efficiency")
    return {name: getattr(found, name) for name in numbers}
