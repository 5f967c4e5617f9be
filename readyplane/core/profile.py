"""What a worker class can do: prefill and iteration times, KV capacity, link classes (R20.1).

A profile is made of measured points; between them prefill time is interpolated, beyond them it is
extrapolated with the last slope. Iteration time is a non-negative least-squares fit
`a + b * sequences + c * kv_tokens` of the measured points, because the published grids are small
and not monotone; `fit_error` says how well that fits.

Plain Python on purpose: agents and engines read profiles, and numpy alone would be a quarter of
their imports, which are part of a start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from math import fsum, isfinite

from readyplane.core.errors import InvalidField
from readyplane.core.identity import digest_of
from readyplane.core.profile_fit import StageFit, fit_document, read_fit

EAGER_FACTOR = 1.3
"""Assumed of an engine without compiled graphs until a profile says what was measured."""


ITERATION_S_MIN = 1e-6


@dataclass(frozen=True, slots=True)
class LinkClass:
    """A class of link between two workers.

    Attributes:
        name: for example `rdma-400g`.
        bandwidth_bytes_per_s: one transfer alone. setup_s: latency before the first byte.
    """

    name: str
    bandwidth_bytes_per_s: float
    setup_s: float

    def transfer_s(self, size_bytes: float, *, sharers: int = 1) -> float:
        """Seconds to move `size_bytes` when `sharers` transfers share the link."""
        return self.setup_s + size_bytes * max(1, sharers) / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class ClassProfile:
    """Measured service times of one worker class.

    Attributes:
        name: profile name. source: where the figures come from.
        worker_class: class it describes. gpus: GPUs of one worker. price_per_gpu_hour: cost unit.
        prefill_points: (uncached prompt tokens, milliseconds), ascending, at least two.
        decode_points: (sequences, KV tokens resident, milliseconds an iteration).
        kv_capacity_tokens: KV tokens one worker holds.
        kv_bytes_per_token: bytes handed over per token.
        max_batch_tokens: tokens of one prefill chunk. max_num_seqs: sequences at once.
        slow_factor: every time above is multiplied by it (1 = as measured); a demo states it.
        eager_factor: times of a worker started eagerly, without compiled graphs, over those above.
        measured: False for figures that nobody measured on this class: targets made with it are
            advice until its correction rests on enough evidence.
        fit: how well it predicts what it was not made of; empty where nobody worked that out.
    """

    name: str
    source: str
    worker_class: str
    gpus: int
    price_per_gpu_hour: float
    prefill_points: tuple[tuple[float, float], ...]
    decode_points: tuple[tuple[float, float, float], ...]
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    max_batch_tokens: int = 8192
    max_num_seqs: int = 256
    slow_factor: float = 1.0
    eager_factor: float = EAGER_FACTOR
    measured: bool = True
    fit: tuple[StageFit, ...] = ()

    @classmethod
    def from_document(cls, doc: Mapping[str, object]) -> ClassProfile:
        """Build from a JSON document with these attribute names.

        Raises:
            InvalidField: a missing, unknown, non-finite or non-positive field.
        """
        return _read_profile(cls, doc)

    def document(self) -> dict[str, object]:
        """JSON document with the attribute names; `measured` and `fit` only where they say more."""
        more: dict[str, object] = {} if self.measured else {"measured": False}
        if self.eager_factor != EAGER_FACTOR:
            more["eager_factor"] = self.eager_factor
        if self.fit:
            more["fit"] = fit_document(self.fit)
        return {
            "name": self.name,
            "source": self.source,
            "worker_class": self.worker_class,
            "gpus": self.gpus,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "prefill_points": [list(p) for p in self.prefill_points],
            "decode_points": [list(p) for p in self.decode_points],
            "kv_capacity_tokens": self.kv_capacity_tokens,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "max_batch_tokens": self.max_batch_tokens,
            "max_num_seqs": self.max_num_seqs,
            "slow_factor": self.slow_factor,
            **more,
        }

    @cached_property
    def eager(self) -> ClassProfile:
        """What a worker does that was started eagerly, under a name of its own."""
        slow_factor = self.slow_factor * self.eager_factor
        return replace(self, name=f"{self.name}-eager", slow_factor=slow_factor, eager_factor=1.0)

    @cached_property
    def digest(self) -> str:
        """Identity of the profile's content."""
        return digest_of(self.document())

    @cached_property
    def _prefill(self) -> tuple[list[float], list[float], float]:
        x = [p[0] for p in self.prefill_points]
        y = [p[1] * (self.slow_factor / 1000.0) for p in self.prefill_points]
        y = list(accumulate(y, max))
        slope = (y[-1] - y[0]) / (x[-1] - x[0])
        tail = (y[-1] - y[-2]) / (x[-1] - x[-2])
        return x, y, max(slope, tail)

    @cached_property
    def _decode(self) -> tuple[float, float, float]:
        rows = [(1.0, p[0], p[1]) for p in self.decode_points]
        scale = [max(column) for column in zip(*rows, strict=True)]
        scaled = [[v / most for v, most in zip(row, scale, strict=True)] for row in rows]
        fitted = _non_negative_fit(scaled, [p[2] for p in self.decode_points])
        a, b, c = (
            v / most * (self.slow_factor / 1000.0) for v, most in zip(fitted, scale, strict=True)
        )
        return a, b, c

    @cached_property
    def fit_error(self) -> float:
        """Median relative error of the iteration fit over the measured points, a fraction."""
        a, b, c = self._decode
        errors = []
        for sequences, kv_tokens, milliseconds in self.decode_points:
            want = milliseconds * (self.slow_factor / 1000.0)
            errors.append(abs(a + b * sequences + c * kv_tokens - want) / want)
        errors.sort()
        half = len(errors) // 2
        return errors[half] if len(errors) % 2 else (errors[half - 1] + errors[half]) / 2

    def prefill_s(self, tokens: float, cached: float = 0.0) -> float:
        """Seconds to prefill `tokens` uncached prompt tokens after `cached` tokens already held.

        A cached prefix costs no projection work but later tokens attend to it; the difference of
        the measured curve at (cached + tokens) and at cached carries that attention cost. It is
        never less than the curve at `tokens` alone.
        """
        if tokens <= 0:
            return 0.0
        alone = self._prefill_at(tokens)
        if cached <= 0:
            return alone
        return max(alone, self._prefill_at(tokens + cached) - self._prefill_at(cached))

    def _prefill_at(self, tokens: float) -> float:
        x, y, tail = self._prefill
        if tokens >= x[-1]:
            return y[-1] + tail * (tokens - x[-1])
        if tokens <= x[0]:
            return y[0]
        i = bisect_right(x, tokens)
        return y[i - 1] + (y[i] - y[i - 1]) / (x[i] - x[i - 1]) * (tokens - x[i - 1])

    def iteration_s(self, sequences: float, kv_tokens: float) -> float:
        """Seconds of one decode iteration with `sequences` running over `kv_tokens` KV tokens.

        Never zero, though a fit through few points may be at its corner: rates divide by it (B13).
        """
        a, b, c = self._decode
        return max(ITERATION_S_MIN, a + b * sequences + c * kv_tokens)

    def decode_coefficients_s(self) -> tuple[float, float, float]:
        """(a, b, c) of `iteration_s`, in seconds: base, per sequence, per KV token."""
        return self._decode

    def prefill_tokens_per_s(self, isl: float) -> float:
        """Prefill rate of one worker for prompts of `isl` uncached tokens, one after another."""
        tokens = max(1.0, isl)
        return tokens / self.prefill_s(tokens)

    def decode_sequences(self, *, tpot_s: float, context: float) -> float:
        """Most sequences of `context` KV tokens each whose iteration stays within `tpot_s`.

        Bounded by KV capacity and `max_num_seqs`; 0 when even one does not fit.
        """
        a, b, c = self._decode
        by_time = (tpot_s - a) / (b + c * context) if b + c * context > 0 else float("inf")
        by_memory = self.kv_capacity_tokens / max(1.0, context)
        return max(0.0, min(by_time, by_memory, float(self.max_num_seqs)))

    def decode_tokens_per_s(self, *, tpot_s: float, context: float) -> float:
        """Decode rate of one worker at the largest batch that keeps `tpot_s`."""
        sequences = self.decode_sequences(tpot_s=tpot_s, context=context)
        if sequences <= 0:
            return 0.0
        return sequences / self.iteration_s(sequences, sequences * context)


def _non_negative_fit(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """Least squares with coefficients of at least 0, exact by trying every set of columns.

    Args:
        rows: the design, each column scaled to at most 1. target: one value a row.
    """
    columns = list(zip(*rows, strict=True))
    gram = [[fsum(p * q for p, q in zip(u, v, strict=True)) for v in columns] for u in columns]
    right = [fsum(p * q for p, q in zip(u, target, strict=True)) for u in columns]
    best, best_error = [0.0] * len(columns), float("inf")
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            found = _solve(
                [[gram[i][j] for j in chosen] for i in chosen], [right[i] for i in chosen]
            )
            if found is None or min(found) < 0:
                continue
            full = [0.0] * len(columns)
            for i, value in zip(chosen, found, strict=True):
                full[i] = value
            error = fsum(
                (fsum(v * f for v, f in zip(row, full, strict=True)) - want) ** 2
                for row, want in zip(rows, target, strict=True)
            )
            if error < best_error:
                best, best_error = full, error
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """A small symmetric system; None when its columns depend on each other (fewer will do)."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        if abs(rows[pivot][i]) < 1e-12 * max(1.0, abs(matrix[i][i])):
            return None
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for below in rows[i + 1 :]:
            factor = below[i] / rows[i][i]
            for j in range(i, size + 1):
                below[j] -= factor * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = fsum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found


_NUMBERS = (
    "gpus",
    "price_per_gpu_hour",
    "kv_capacity_tokens",
    "kv_bytes_per_token",
    "max_batch_tokens",
    "max_num_seqs",
    "slow_factor",
    "eager_factor",
)
_OPTIONAL = frozenset({"max_batch_tokens", "max_num_seqs", "slow_factor", "eager_factor"})
_WHOLE = frozenset(_NUMBERS) - {"price_per_gpu_hour", "slow_factor", "eager_factor"}


def _read_profile(cls: type[ClassProfile], doc: Mapping[str, object]) -> ClassProfile:
    known = set(cls.__dataclass_fields__)
    for name in doc:
        if name not in known:
            raise InvalidField(f"profile.{name}", doc[name], "remove the unknown field")
    values = _scalars(doc)
    for name, width in (("prefill_points", 2), ("decode_points", 3)):
        rows = doc.get(name)
        if not isinstance(rows, list | tuple) or len(rows) < 2:
            raise InvalidField(f"profile.{name}", rows, "list at least two measured points")
        values[name] = tuple(
            tuple(_positive(v, f"profile.{name}[{i}]") for v in _row(r, width, f"{name}[{i}]"))
            for i, r in enumerate(rows)
        )
    measured = doc.get("measured", True)
    if not isinstance(measured, bool):
        raise InvalidField("profile.measured", measured, "write true or false")
    values["measured"] = measured
    if "fit" in doc:
        values["fit"] = read_fit(doc["fit"])
    points: tuple[tuple[float, float], ...] = values["prefill_points"]  # type: ignore[assignment]
    if any(b[0] <= a[0] for a, b in pairwise(points)):
        raise InvalidField("profile.prefill_points", "order", "sort by ascending token count")
    return cls(**values)  # type: ignore[arg-type]


def _scalars(doc: Mapping[str, object]) -> dict[str, object]:
    values: dict[str, object] = {}
    for name in ("name", "source", "worker_class"):
        text = doc.get(name)
        if not isinstance(text, str) or not text:
            raise InvalidField(f"profile.{name}", text, "use a non-empty text")
        values[name] = text
    for name in _NUMBERS:
        if name not in doc and name in _OPTIONAL:
            continue
        number = _positive(doc.get(name), f"profile.{name}")
        values[name] = int(number) if name in _WHOLE else number
    return values


def _row(row: object, width: int, where: str) -> list[object]:
    if not isinstance(row, list | tuple) or len(row) != width:
        raise InvalidField(f"profile.{where}", row, f"give {width} numbers")
    return list(row)


def _positive(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidField(where, value, "use a number")
    if not isfinite(value) or value <= 0:
        raise InvalidField(where, value, "use a finite number above 0")
    return float(value)
