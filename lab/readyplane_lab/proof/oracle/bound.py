"""What one input costs at least: O_LB by layers, and the floor below it that nothing can undercut.

Owns the bill of both pools together, in the words of a `Setting`. Handed to the report as the lower
end of the bracket in which the true optimum lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from readyplane.core.errors import InvalidField
from readyplane_lab.proof.oracle.demand import Foresight, Work, whole
from readyplane_lab.proof.oracle.floor import (
    CELLS_MAX,
    Floor,
    decode_demand,
    floor,
    prefill_demand,
    together,
)
from readyplane_lab.proof.oracle.layers import Layered, layered
from readyplane_lab.proof.port import Setting
from readyplane_lab.simulator.outcome import Floats


@dataclass(frozen=True, slots=True)
class Bound:
    """The cheapest whole fleets over the known need.

    Attributes:
        prefill, decode: optimum of each pool. gpu_hours, cost: of both, billed from allocation to
            release.
    """

    prefill: Layered
    decode: Layered
    gpu_hours: float
    cost: float


@dataclass(frozen=True, slots=True)
class Lowest:
    """What no run without a miss can be billed less than.

    Attributes:
        pools: prefill and decode, or the one pool of workers that do both. gpu_hours: of all.
    """

    pools: tuple[Floor, ...]
    gpu_hours: float


def lower_bound(setting: Setting, *, span_s: float | None = None, margin: float = 1.0) -> Bound:
    """O_LB: optimal whole fleets; a start costs a median T_ready and a drain.

    Args:
        setting: with the need, the first fleet and the least one. span_s: of the bill.
        margin: multiplies the need before it is rounded up.
    """
    needs = needs_of(setting, margin=margin)
    found = [
        layered(
            need,
            step_s=setting.hindsight.step_s,
            beta_s=setting.t_ready.p50_s + drain_s,
            initial=initial,
            low=low,
            span_s=span_s,
        )
        for need, drain_s, initial, low in zip(
            needs, setting.drain_s, setting.initial, setting.low, strict=True
        )
    ]
    hours = [
        pool.cost_s * profile.gpus / 3600.0
        for pool, profile in zip(found, (setting.prefill, setting.decode), strict=True)
    ]
    prices = (setting.prefill.price_per_gpu_hour, setting.decode.price_per_gpu_hour)
    return Bound(
        prefill=found[0],
        decode=found[1],
        gpu_hours=sum(hours),
        cost=sum(h * price for h, price in zip(hours, prices, strict=True)),
    )


def needs_of(setting: Setting, *, margin: float = 1.0) -> tuple[Floats, Floats]:
    """Least whole workers of each step of each pool, with a margin."""
    known = setting.hindsight
    if isinstance(known, Foresight):
        return whole(known.load_p * margin), whole(known.load_d * margin)
    return whole(known.need_p * margin), whole(known.need_d * margin)


def lowest_bill(
    work: Work,
    setting: Setting,
    *,
    span_s: float,
    start_s: float,
    convertible: bool = False,
    cells: int = CELLS_MAX,
) -> Lowest:
    """The floor of both pools.

    Args:
        work: of `request_work(..., strict=True)`. setting: its `initial` must be the first fleet of
            the run that is judged, and its `low` nothing that a fault can take away.
        start_s: seconds billed before a worker serves that no start of this input can undercut.
        convertible: workers may do the work of both pools, so that only their sum is bounded.

    Raises:
        InvalidField: convertible workers of two classes, whose work is not of one kind.
    """
    if convertible and setting.prefill.name != setting.decode.name:
        names = f"{setting.prefill.name}, {setting.decode.name}"
        raise InvalidField("convertible", names, "use one class for both pools")
    demands = [prefill_demand(work, setting.slo), decode_demand(work, setting.slo)]
    rows = list(zip(demands, setting.initial, setting.low, strict=True))
    if convertible:
        rows = [(together(demands), sum(setting.initial), sum(setting.low))]
    pools = tuple(
        floor(demand, span_s=span_s, start_s=start_s, initial=first, low=least, cells=cells)
        for demand, first, least in rows
    )
    gpus = (setting.prefill.gpus, setting.decode.gpus)
    hours = sum(p.cost_s * each for p, each in zip(pools, gpus, strict=False)) / 3600.0
    return Lowest(pools, hours)
