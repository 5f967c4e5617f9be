"""What an agent tells a scraper of its start: segments, bytes by tier, faults of sources.

Owns the text of these families; `life` adds what was reused and how far an upgrade is.
"""

from __future__ import annotations

from readyplane.core.startup import critical_path
from readyplane_agent.source_use import Fetched
from readyplane_agent.trace import StartTrace


def start_metrics(trace: StartTrace, who: str, *, end_s: float) -> list[str]:
    """Segments of a start; `who` are the labels of this worker, `end_s` is now or when it was up."""
    lines = ["# TYPE readyplane_agent_start_segment_seconds gauge"]
    segments = trace.segments()
    path = critical_path(segments, start_s=trace.begin_s, end_s=end_s)
    for name, value in path.inclusive_s.items():
        lines.append(
            f'readyplane_agent_start_segment_seconds{{{who},segment="{name}"}} {value:.6f}'
        )
    lines.append("# TYPE readyplane_agent_start_unexplained_seconds gauge")
    lines.append(f"readyplane_agent_start_unexplained_seconds{{{who}}} {path.unexplained_s:.6f}")
    saved_s = sum(segment.saved_s for segment in segments)
    lines.append("# TYPE readyplane_agent_start_saved_seconds gauge")
    lines.append(f"readyplane_agent_start_saved_seconds{{{who}}} {saved_s:.6f}")
    return lines


def start_text(trace: StartTrace, *, end_s: float) -> str:
    """A start in one line: how long it took, and what for."""
    path = critical_path(trace.segments(), start_s=trace.begin_s, end_s=end_s)
    shares = ", ".join(f"{n} {v:.2f}" for n, v in path.exclusive_s.items())
    unexplained = 100 * path.unexplained_fraction
    return f"after {path.wall_s:.2f} s, {unexplained:.1f} % unexplained: {shares}"


def source_metrics(fetched: Fetched | None, who: str) -> list[str]:
    """Bytes and faults by tier of where the weights came from."""
    given: dict[str, int] = {}
    faults: dict[tuple[str, str], int] = {}
    for use in [] if fetched is None else fetched.uses:
        given[str(use.tier)] = given.get(str(use.tier), 0) + use.bytes_read
        if use.fault is not None:
            key = (str(use.tier), use.fault.kind)
            faults[key] = faults.get(key, 0) + 1
    lines = ["# TYPE readyplane_agent_source_bytes_total counter"]
    for tier, size in given.items():
        lines.append(f'readyplane_agent_source_bytes_total{{{who},tier="{tier}"}} {size}')
    lines.append("# TYPE readyplane_agent_source_faults_total counter")
    for (tier, kind), count in faults.items():
        lines.append(
            f'readyplane_agent_source_faults_total{{{who},tier="{tier}",kind="{kind}"}} {count}'
        )
    return lines
