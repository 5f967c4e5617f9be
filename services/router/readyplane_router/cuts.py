"""Links between two workers over which KV did not come: a circuit each (`circuit`).

Owns which pairs are not to be made although both workers are well. A link that has never failed has
no entry; one that opened lets a probe through after a while, and a good one closes it for good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from readyplane_router import circuit

LINKS_MAX = 4_096
NOTHING: Mapping[str, frozenset[str]] = {}


class Cuts:
    """The links of one model that have failed lately.

    Args:
        failures_max, window_s, open_s: as of a worker's circuit.
    """

    def __init__(self, *, failures_max: int, window_s: float, open_s: float) -> None:
        """No link has failed."""
        self._failures_max, self._window_s, self._open_s = failures_max, window_s, open_s
        self._circuits: dict[tuple[str, str], circuit.Circuit] = {}

    def failed(self, prefill: str, decode: str, *, now_s: float) -> None:
        """KV did not come over from one to the other (seat keys)."""
        if len(self._circuits) >= LINKS_MAX and (prefill, decode) not in self._circuits:
            del self._circuits[next(iter(self._circuits))]
        self._circuits[prefill, decode] = circuit.failed(
            self._circuits.get((prefill, decode), circuit.Circuit()),
            now_s=now_s,
            failures_max=self._failures_max,
            window_s=self._window_s,
        )

    def succeeded(self, prefill: str, decode: str) -> None:
        """KV came over; a late success of an open circuit does not close it."""
        if not self._circuits:
            return
        state = self._circuits.get((prefill, decode))
        if state is not None and state.state != circuit.OPEN:
            del self._circuits[prefill, decode]

    def taken(self, prefill: str, decode: str) -> None:
        """A pair has been booked: where a link is half open, it is the probe."""
        self._probe(prefill, decode, probing=True)

    def given_back(self, prefill: str, decode: str) -> None:
        """A pair ended; a probe without a verdict makes room for another."""
        self._probe(prefill, decode, probing=False)

    def _probe(self, prefill: str, decode: str, *, probing: bool) -> None:
        state = self._circuits.get((prefill, decode)) if self._circuits else None
        if state is not None and state.state == circuit.HALF_OPEN:
            self._circuits[prefill, decode] = replace(state, probing=probing)

    def forget(self, key: str) -> None:
        """A worker is gone, and its links with it."""
        if self._circuits:
            kept = {pair: state for pair, state in self._circuits.items() if key not in pair}
            self._circuits = kept

    def now(self, *, now_s: float) -> Mapping[str, frozenset[str]]:
        """By seat key of a decode worker, the prefill workers from which nothing is to come."""
        if not self._circuits:
            return NOTHING
        found: dict[str, set[str]] = {}
        for (prefill, decode), state in self._circuits.items():
            seen = circuit.looked_at(state, now_s=now_s, open_s=self._open_s)
            if seen is not state:
                self._circuits[prefill, decode] = seen
            if not circuit.passes(seen):
                found.setdefault(decode, set()).add(prefill)
        return {decode: frozenset(prefills) for decode, prefills in found.items()}

    @property
    def open_links(self) -> int:
        """Links over which nothing goes, or only a probe."""
        return sum(state.state != circuit.CLOSED for state in self._circuits.values())
