"""The terminal of `readyplane up`: sentences while starting, then one live summary line."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from readyplane_lab.up.observe import Seen
from readyplane_lab.up.traffic import Tally

PLAIN_EVERY_S = 10.0


class Terminal:
    """Writes to one console; without a terminal it prints the line every 10 s instead."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console = console
        self._plain = plain or not console.is_terminal
        self._live: Live | None = None
        self._printed_s = float("-inf")

    def say(self, sentence: str) -> None:
        """One step."""
        self._console.print(f"· {sentence}", highlight=False, markup=False)

    def show(self, seen: Seen, tally: Tally, *, at_s: float) -> None:
        """Bring the summary line up to date. `at_s`: seconds since the run began."""
        line = summary_line(seen, tally, at_s=at_s)
        if self._plain:
            if at_s - self._printed_s >= PLAIN_EVERY_S:
                self._printed_s = at_s
                self._console.print(line, highlight=False)
            return
        if self._live is None:
            self._live = Live(line, console=self._console, refresh_per_second=4)
            self._live.start()
        self._live.update(line)

    def close(self) -> None:
        """Leave the live line where it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def summary_line(seen: Seen, tally: Tally, *, at_s: float) -> Text:
    """`P desired/provisioned/ready load …  D …  TTFT …  TPOT …  attainment …`."""
    text = Text(f"{at_s:6.0f} s  ")
    for label, name in (("P", "prefill"), ("D", "decode")):
        pool = seen.pool(name)
        text.append(f"{label} ", style="bold")
        text.append(
            f"{_count(pool, 'desired')}/{_count(pool, 'provisioned')}/{_count(pool, 'ready')}"
        )
        load = pool.get("load")
        style = "red" if load is not None and load > 1.0 else "green"
        text.append(f" load {_number(load)}  ", style=style if load is not None else "")
    latency = seen.state.get("latency", {})
    for label, name in (("TTFT", "ttft"), ("TPOT", "tpot")):
        actual = latency.get(name, {}).get("actual", {})
        p90 = actual.get("p90_s") if actual.get("count") else None
        text.append(f"{label} p90 {_number(p90, 3)} s  ")
    share = "–" if tally.attainment is None else f"{tally.attainment:.1%}"
    text.append(f"{tally.ended}/{tally.sent} requests, attainment {share}")
    if degraded := seen.state.get("degraded"):
        text.append(f"  degraded: {degraded}", style="yellow")
    order = seen.state.get("degradation", {}).get("ordered")
    if order is not None:
        share = order["admit_share"]
        kept = f", {share:.0%} of it admitted" if share > 0 else ""
        text.append(f"  refused up to priority {order['priority']}{kept}", style="red")
    return text


def _count(pool: dict[str, Any], name: str) -> str:
    value = pool.get(name)
    return "–" if value is None else str(value)


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
