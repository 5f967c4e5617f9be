"""The values of a forecast: how to make one, what a series remembers, what is handed out.

Owns shapes and bounds only. Everything is frozen and made of plain fields, so that a journal record
brings a series back as it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from readyplane_planner.forecast.sketch import Sketch

EXPERTS = ("window", "last_30s", "ewma_60s", "ewma_180s", "ewma_600s", "holt_damped")
TAUS_S = (60.0, 180.0, 600.0)
HORIZONS_S = (12.0, 36.0, 108.0, 324.0, 972.0)
"""Where forecasts are judged; what lies between is interpolated."""
PENDING_MAX = 10
SPACING_SHARE, SPACING_S = 0.125, 4.0
"""A forecast is kept for judging every eighth of its horizon: closer ones tell the same again."""
SCORES_MAX = 120
DAY_BINS = 48


def spacing_s(horizon_s: float) -> float:
    """Seconds between forecasts that are kept."""
    return max(SPACING_S, SPACING_SHARE * horizon_s)


@dataclass(frozen=True, slots=True)
class Knobs:
    """How to forecast.

    Attributes:
        quantile: share of horizons whose largest demand shall stay below the upper bound.
        window_s: a rate is the mean over this trailing window. warmup_s: no score before that.
        prior_margin: upper/level - 1 at a horizon of 60 s while nothing was scored.
        aci_step: how fast the miss rate corrects the quantile.
    """

    quantile: float = 0.9
    window_s: float = 10.0
    warmup_s: float = 600.0
    prior_margin: float = 0.3
    aci_step: float = 0.02


@dataclass(frozen=True, slots=True)
class Pending:
    """A forecast whose truth is not known yet; `peak` is the largest rate seen since.

    Attributes:
        total: work of the series when it was made. experts: what each said.
        upper: the bound, and the two that it was mixed of.
        scale: what its score is a share of.
    """

    made_s: float
    total: float
    experts: tuple[float, ...]
    level: float
    upper: float
    mixed: tuple[float, float]
    scale: float
    peak: float = 0.0


@dataclass(frozen=True, slots=True)
class Track:
    """One horizon of a series: forecasts that wait for their truth, and how earlier ones did.

    Attributes:
        losses: of each expert, fading. scores: (largest rate - level) / scale of the last judged,
            oldest first. peaks: their largest rates, tokens/s.
        places: (quantile, its score, its largest rate), as of the last judged.
        mixed: what the two bounds lost, fading. miss: the adaptive miss rate, None before the first.
        covered, judged: how often the bound held. pinball: fading mean loss of the bound.
        growth: largest rate of a horizon minus the rate at its beginning, tokens/s.
    """

    horizon_s: float
    losses: tuple[float, ...] = (0.0,) * len(EXPERTS)
    pending: tuple[Pending, ...] = ()
    scores: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()
    places: tuple[float, float, float] = (0.0, 0.0, 0.0)
    mixed: tuple[float, float] = (0.0, 0.0)
    miss: float | None = None
    judged: int = 0
    covered: int = 0
    pinball: float = 0.0
    growth: Sketch = field(default_factory=Sketch)


@dataclass(frozen=True, slots=True)
class Spells:
    """Times with load and times nearly without, fading over hours.

    Attributes:
        on: what it is now. at_s: when that was last counted, None after a gap.
        on_s, off_s: seconds of each.
        on_count, off_count: spells that ended. rates: of the window while on.
    """

    on: bool = False
    at_s: float | None = None
    on_s: float = 0.0
    off_s: float = 0.0
    on_count: float = 0.0
    off_count: float = 0.0
    rates: Sketch = field(default_factory=Sketch)


@dataclass(frozen=True, slots=True)
class Days:
    """Mean rate by half-hour of the day, and how far that is to be believed.

    Attributes:
        profile: tokens/s by bin, None where never seen. bin: the running one, None before the first
            rate and after a gap; begun_s, begun: time and work of the series at its beginning.
        last: means of the bins before it, newest last. trust: 0 to 1.
        closed: half-hours taken in. lost: fading distances from what came, tokens/s, of the profile
            where it was believed, and of what had been an hour before.
        shift_s: added to the clock for the time of day: a successor has another one.
    """

    profile: tuple[float | None, ...] = (None,) * DAY_BINS
    bin: int | None = None
    begun_s: float = 0.0
    begun: float = 0.0
    last: tuple[float, ...] = ()
    trust: float = 0.5
    closed: int = 0
    lost: tuple[float, float] = (0.0, 0.0)
    shift_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Season:
    """What the days before say of a time that is coming.

    Attributes:
        rate: tokens/s, the largest of that time. in_s: seconds until then. trust: in the pattern,
            0 to 1. skill: share of the distance of an hour ago that it saves, 1 at best, below 0
            where it is worse. days: that were seen.
    """

    rate: float
    in_s: float
    trust: float
    skill: float
    days: float


@dataclass(frozen=True, slots=True)
class Series:
    """Everything a series remembers; bounded, serialisable, replaced and never changed.

    Attributes:
        total: work integrated since `begun_s`, in tokens. recent: (time, total) of the last 30 s.
        peak: largest rate of a window, fading over half an hour.
        spread: usual distance of the last 30 s from the mean of some minutes, tokens/s.
        tracks: by horizon, ascending. breaks: changes of regime; broke_s: the last of them.
        clamps: forecasts that an expert put below zero (B17).
    """

    begun_s: float | None = None
    updated_s: float = 0.0
    total: float = 0.0
    peak: float = 0.0
    recent: tuple[tuple[float, float], ...] = ()
    ewma: tuple[float, ...] = ()
    holt_level: float = 0.0
    holt_trend: float = 0.0
    spread: float = 0.0
    tracks: tuple[Track, ...] = ()
    spells: Spells = field(default_factory=Spells)
    days: Days = field(default_factory=Days)
    clamps: int = 0
    breaks: int = 0
    broke_s: float | None = None

    @property
    def judged(self) -> int:
        """Forecasts of all horizons whose truth is known."""
        return sum(t.judged for t in self.tracks)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Demand over the coming horizon in tokens/s, with how good such forecasts have been.

    Attributes:
        level: the weighted expectation. upper: quantile of the largest rate in the horizon.
        lower: mirrored bound for intervals. now: rate of the trailing window.
        coverage: share of judged horizons that stayed below the bound, None before the first.
        pinball: mean pinball loss of the bound, as a share of the scale.
    """

    level: float
    upper: float
    lower: float
    now: float
    horizon_s: float
    weights: tuple[float, ...] = ()
    coverage: float | None = None
    judged: int = 0
    pinball: float = 0.0


@dataclass(frozen=True, slots=True)
class Bursts:
    """How on/off a series is.

    Attributes:
        on_share: share of time with load, 1 for a series that never comes near zero.
        on_rate: that quantile of the window's rate while there is load, tokens/s.
        on_s, off_s: mean length of a time with and without load; None where none has ended yet.
    """

    on_share: float
    on_rate: float
    on_s: float | None
    off_s: float | None
