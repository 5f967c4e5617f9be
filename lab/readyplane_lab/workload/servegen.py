"""Requests drawn from ServeGen's client rates: 14 days of a production cloud, client by client.

The data set publishes for every client and 10 minutes a rate, the variation (CV) of the times
between its requests and the family of their distribution, and for the largest clients quantiles of
prompt and output lengths every six hours; requests themselves it does not. They are drawn so:

* *How many*: each client's rate times ten minutes times `scale`, rounded at random so that the
  expected number is exact. A client without a row has no request in that time.
* *When*: a renewal process of the published family (Gamma or Weibull) whose shape gives the
  published CV, laid over the ten minutes. The published parameters `p1`, `p2` are not used: for a
  Weibull they miss the published rate by up to 2.5 times, for a Gamma they say the same.
* *Thinning* (`scale` below 1) asks every client less often and leaves its CV. Throwing away drawn
  requests instead would make each client a Poisson process, and bursts are what this data is for.
* *How long*: by the client's own quantiles of the nearest six hours. Clients without any (54 % of
  the requests of m-large, 59 % of m-small) get those of a known client, drawn for each request by
  the known clients' rates of that time: the pooled quantiles weighted by rate, which keep that
  long prompts and long answers are not everybody's.
* Prompts share nothing, since the data says nothing of prefixes.

Every client has its own stream of draws, named by the seed and its number, so that the requests of
a client do not depend on which others are drawn.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import overload

import numpy as np
import zstandard
from numpy.typing import NDArray

from readyplane.core.errors import InvalidField
from readyplane_lab.workload.public import public_file
from readyplane_lab.workload.request import WorkloadRequest

BIN_S = 600.0
DAY_S = 86_400.0
WINDOW_S = 21_600.0
DAYS = 14
# Shapes beyond these underflow or are regular like a clock; a few bins of few requests claim more.
CV_MIN, CV_MAX = 0.05, 20.0
REQUESTS_MAX = 50_000_000
_UNIQUE = 1 << 45
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of the fortnight, seconds since it began."""

    begin_s: float
    end_s: float

    @classmethod
    def of_day(cls, day: int, *, from_h: float = 0.0, hours: float = 24.0) -> Window:
        """Hours of a day, the first day being 0.

        Raises:
            InvalidField: not within the fortnight.
        """
        begin_s = day * DAY_S + from_h * 3600.0
        window = cls(begin_s, begin_s + hours * 3600.0)
        if not (0 <= window.begin_s < window.end_s <= DAYS * DAY_S):
            raise InvalidField("servegen day", day, f"use 0 to {DAYS - 1}, and hours within it")
        return window

    @property
    def bins(self) -> range:
        """The 10-minute bins that begin within it."""
        return range(math.ceil(self.begin_s / BIN_S), math.ceil(self.end_s / BIN_S))


@dataclass(frozen=True, slots=True)
class Columns:
    """A drawn workload as columns, in order of arrival, the first at 0: what a fluid needs.

    `client`: the number of who asked.
    """

    at_s: Floats
    isl: Ints
    osl: Ints
    client: Ints

    def __len__(self) -> int:
        return len(self.at_s)


class Drawn(Sequence[WorkloadRequest]):
    """The same as requests, made when they are looked at: a day of a cloud does not fit otherwise.

    Every prompt is its own. `labelled`: each carries its client as its tenant.
    """

    def __init__(self, columns: Columns, *, labelled: bool = False) -> None:
        self.columns = columns
        self.labelled = labelled

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, index: int) -> WorkloadRequest: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[WorkloadRequest]: ...
    def __getitem__(self, index: int | slice) -> WorkloadRequest | Sequence[WorkloadRequest]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        own = self.columns
        isl, parts = int(own.isl[i]), ((_UNIQUE + i, int(own.isl[i])),)
        tenant = _tenant(int(own.client[i])) if self.labelled else ""
        return WorkloadRequest(i, float(own.at_s[i]), isl, int(own.osl[i]), parts, tenant)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        own, step = self.columns, 65_536
        for begin in range(0, len(self), step):
            part = slice(begin, begin + step)
            columns = (own.at_s, own.isl, own.osl, own.client)
            rows = zip(*(column[part].tolist() for column in columns), strict=True)
            for i, (at_s, isl, osl, client) in enumerate(rows, begin):
                tenant = _tenant(client) if self.labelled else ""
                yield WorkloadRequest(i, at_s, isl, osl, ((_UNIQUE + i, isl),), tenant)


def _tenant(client: int) -> str:
    return f"client-{client}"


@dataclass(frozen=True, slots=True)
class Client:
    """A client's 10-minute bins that have requests, as columns."""

    number: int
    bins: Ints
    rate_rps: Floats
    iat_cv: Floats
    weibull: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Lengths:
    """Quantiles of a client's lengths: windows of six hours by `LEVELS`.

    As logarithms, since between the last two levels a straight line would be all tail.
    """

    begin_s: Floats
    log_isl: Floats
    log_osl: Floats

    def window_of(self, at_s: float) -> int:
        """The nearest one."""
        return int(np.abs(self.begin_s - at_s // WINDOW_S * WINDOW_S).argmin())


LEVELS: Floats = np.array([*range(100), 99.5, 99.9, 100.0]) / 100.0


@dataclass(frozen=True)
class ServeGen:
    """The tables of one model class, `m-large` or `m-small`."""

    name: str
    clients: tuple[Client, ...]
    lengths: Mapping[int, Lengths]

    def rates_rps(self, window: Window) -> Floats:
        """Requests per second of all clients, by bin."""
        return self._totals[window.bins.start : window.bins.stop]

    @cached_property
    def _totals(self) -> Floats:
        total = np.zeros(round(DAYS * DAY_S / BIN_S))
        for client in self.clients:
            total[client.bins] += client.rate_rps
        return total

    @cached_property
    def _known_shares(self) -> tuple[Ints, Floats]:
        """Clients whose lengths are known; cumulative share of each in their requests, by window."""
        numbers = np.array(sorted(self.lengths), dtype=np.int64)
        by_window = np.zeros((len(numbers), round(DAYS * DAY_S / WINDOW_S)))
        for client in self.clients:
            if client.number in self.lengths:
                row = int(np.searchsorted(numbers, client.number))
                windows = (client.bins * BIN_S // WINDOW_S).astype(np.int64)
                np.add.at(by_window[row], windows, client.rate_rps)
        by_window += 1e-9  # nobody of them asked: all alike
        return numbers, np.cumsum(by_window, axis=0) / by_window.sum(axis=0)

    def draw(self, window: Window, *, scale: float, seed: int) -> Columns:
        """All requests of a window.

        Args:
            scale: of every client's rate. seed: of every draw.

        Raises:
            InvalidField: a scale that gives none, or more than 50 million.
        """
        expected = float(self.rates_rps(window).sum()) * BIN_S * scale
        if not (math.isfinite(scale) and 0 < expected <= REQUESTS_MAX):
            raise InvalidField(
                "scale", scale, f"give one that brings 1 to {REQUESTS_MAX:,} requests"
            )
        parts = [self._of_client(client, window, scale, seed) for client in self.clients]
        at_s, isl, osl = (np.concatenate([p[i] for p in parts]) for i in range(3))
        client = np.repeat([c.number for c in self.clients], [len(p[0]) for p in parts])
        if not len(at_s):
            raise InvalidField("scale", scale, "give a larger one: it brings no request")
        order = np.argsort(at_s, kind="stable")
        at_s = at_s[order]
        return Columns(
            at_s=at_s - at_s[0],
            isl=isl[order].astype(np.int64),
            osl=osl[order].astype(np.int64),
            client=client[order].astype(np.int64),
        )

    def _of_client(
        self, client: Client, window: Window, scale: float, seed: int
    ) -> tuple[Floats, Floats, Floats]:
        draws = np.random.Generator(np.random.Philox(key=[seed & (2**63 - 1), client.number]))
        rows = slice(*np.searchsorted(client.bins, [window.bins.start, window.bins.stop]))
        bins = client.bins[rows]
        wanted = client.rate_rps[rows] * (BIN_S * scale)
        counts = np.floor(wanted + draws.random(len(wanted))).astype(np.int64)
        bins, counts = bins[counts > 0], counts[counts > 0]
        if not len(bins):
            return np.zeros(0), np.zeros(0), np.zeros(0)
        at_s = renewals(
            counts,
            _per(client.iat_cv, client.bins, bins),
            _per(client.weibull, client.bins, bins),
            draws,
        ) * BIN_S + np.repeat(bins * BIN_S, counts)
        isl, osl = self._lengths_of(client.number, at_s, draws)
        return at_s, isl, osl

    def _lengths_of(
        self, number: int, at_s: Floats, draws: np.random.Generator
    ) -> tuple[Floats, Floats]:
        u = draws.random((3, len(at_s)))
        windows = (at_s // WINDOW_S).astype(np.int64)
        if number in self.lengths:
            like = np.full(len(at_s), number, dtype=np.int64)
        else:
            numbers, shares = self._known_shares
            like = numbers[(u[2] > shares[:, windows]).sum(axis=0).clip(max=len(numbers) - 1)]
        isl, osl = np.empty(len(at_s)), np.empty(len(at_s))
        groups = like * 1000 + windows
        order = np.argsort(groups, kind="stable")
        for chosen in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
            known = self.lengths[int(like[chosen[0]])]
            row = known.window_of(float(windows[chosen[0]]) * WINDOW_S)
            isl[chosen] = np.interp(u[0, chosen], LEVELS, known.log_isl[row])
            osl[chosen] = np.interp(u[1, chosen], LEVELS, known.log_osl[row])
        return np.rint(np.exp(isl)), np.rint(np.exp(osl))


def _per(values: NDArray[np.generic], bins: Ints, wanted: Ints) -> NDArray[np.generic]:
    return values[np.searchsorted(bins, wanted)]


def renewals(
    counts: Ints, cv: NDArray[np.generic], weibull: NDArray[np.generic], draws: np.random.Generator
) -> Floats:
    """Arrivals of renewal processes, each laid over 0 to 1 so that it has its count exactly.

    `count + 1` times between arrivals are drawn and divided by their sum; the first is cut at
    random, so that arrivals do not begin with the bin.

    Args:
        counts: arrivals of each process, at least 1. cv: of the times between them.
        weibull: of this family; else Gamma.

    Returns:
        `counts.sum()` places, process by process, ascending within each.
    """
    spread = np.clip(cv.astype(np.float64), CV_MIN, CV_MAX)
    gaps_of = np.repeat(np.arange(len(counts)), counts + 1)
    as_weibull = weibull.astype(bool)[gaps_of]
    gaps = np.empty(len(gaps_of))
    shapes = np.exp(np.interp(np.log(spread), *_weibull_shapes()))
    gaps[as_weibull] = draws.weibull(shapes[gaps_of[as_weibull]])
    gaps[~as_weibull] = draws.standard_gamma(spread[gaps_of[~as_weibull]] ** -2.0)
    gaps += 1e-30  # Gamma times of a high CV can all be so small that they are zero
    ends = np.cumsum(counts + 1)
    begins = ends - counts - 1
    gaps /= np.add.reduceat(gaps, begins)[gaps_of]  # before sums run: their sizes differ by decades
    cut = draws.random(len(counts)) * gaps[begins]
    places = np.cumsum(gaps) - (np.arange(len(counts)) + cut)[gaps_of]
    last = np.zeros(len(gaps), dtype=bool)
    last[ends - 1] = True
    inside: Floats = np.clip(places[~last], 0.0, np.nextafter(1.0, 0.0))
    return inside


@lru_cache(maxsize=1)
def _weibull_shapes() -> tuple[Floats, Floats]:
    """CV as its logarithm, ascending, and the log of the shape that gives it."""
    shapes = np.geomspace(30.0, 0.12, 400)
    moments = [(math.lgamma(1 + 2 / k), math.lgamma(1 + 1 / k)) for k in shapes.tolist()]
    log_cv = np.array([0.5 * math.log(math.expm1(two - 2 * one)) for two, one in moments])
    return log_cv, np.log(shapes)


def servegen_day(
    name: str,
    day: int,
    scale: float,
    seed: int,
    *,
    from_h: float = 0.0,
    hours: float = 24.0,
    labelled: bool = False,
) -> Drawn:
    """Requests of a day, or of some hours of it.

    Args:
        name: `m-large` or `m-small`. day: 0 to 13. scale: of the published rates.
        labelled: each request carries its client as its tenant; what is drawn is the same.

    Raises:
        InvalidField: the data is not there, or the day or scale is not possible.
    """
    window = Window.of_day(day, from_h=from_h, hours=hours)
    columns = servegen(name).draw(window, scale=scale, seed=seed)
    return Drawn(columns, labelled=labelled)


def servegen(name: str) -> ServeGen:
    """The tables of `m-large` or `m-small` of the public data.

    Raises:
        InvalidField: they are not there, or broken.
    """
    folder = "traces/servegen"
    return read_servegen(
        name,
        public_file(f"{folder}/{name}_client_rates.csv.zst"),
        public_file(f"{folder}/{name}_length_quantiles_top.csv.zst"),
    )


@lru_cache(maxsize=2)
def read_servegen(name: str, rates: Path, quantiles: Path) -> ServeGen:
    """Tables from their two files.

    Raises:
        InvalidField: a file without the published columns, or with something else than numbers.
    """
    table = _table(rates)
    number, at_s = (_floats(table, column, rates) for column in ("client", "t_s"))
    rate, cv = (_floats(table, column, rates) for column in ("rate_rps", "iat_cv"))
    weibull = np.array([family == "Weibull" for family in table["dist"]])
    clients = []
    for client in np.unique(number):
        rows = np.flatnonzero((number == client) & (rate > 0))
        rows = rows[np.argsort(at_s[rows], kind="stable")]
        bins = (at_s[rows] // BIN_S).astype(np.int64)
        clients.append(Client(int(client), bins, rate[rows], cv[rows], weibull[rows]))
    return ServeGen(name, tuple(clients), _lengths(quantiles))


def _lengths(path: Path) -> dict[int, Lengths]:
    table = _table(path)
    names = [f"q{round(100 * level, 1):g}" for level in LEVELS.tolist()]
    tokens = np.stack([_floats(table, name, path) for name in names], axis=1)
    values = np.log(np.maximum(1.0, tokens))
    number, begin_s = (_floats(table, column, path) for column in ("client", "window_start_s"))
    is_input = np.array([field == "input_tokens" for field in table["field"]])
    found = {}
    for client in np.unique(number):
        both = []
        for kind in (is_input, ~is_input):
            rows = np.flatnonzero((number == client) & kind)
            both.append(rows[np.argsort(begin_s[rows], kind="stable")])
        if [begin_s[i] for i in both[0]] != [begin_s[i] for i in both[1]]:
            raise InvalidField(path.name, int(client), "give input and output of the same windows")
        found[int(client)] = Lengths(begin_s[both[0]], values[both[0]], values[both[1]])
    return found


def _table(path: Path) -> dict[str, list[str]]:
    with zstandard.open(path, "rt", encoding="utf-8") as text:
        rows = csv.reader(io.StringIO(text.read()))
    header = next(rows, [])
    columns = zip(*rows, strict=True)
    return dict(zip(header, (list(c) for c in columns), strict=False))


def _floats(table: Mapping[str, list[str]], column: str, path: Path) -> Floats:
    try:
        return np.array(table[column], dtype=np.float64)
    except (KeyError, ValueError) as error:
        raise InvalidField(path.name, column, f"give that column, in numbers ({error})") from error
