"""How far a policy is from the optimum, and where the distance comes from.

All points are GPU-hours at the attainment asked for. Owns the arithmetic of the comparison only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratios:
    """Of one policy on one input; None where a point that it needs was not reached.

    Attributes:
        to_achievable: R, over O_SIM: the headline. to_bound: over O_LB.
        control: over O_look: what forecast and control lose. myopia: O_look over O_SIM: what short
            sight loses. Their product is R.
        captured: share of what a static fleet wastes that the policy saves; above 1 or below 0
            where it leaves the range between the two.
    """

    to_achievable: float | None
    to_bound: float | None
    control: float | None
    myopia: float | None
    captured: float | None


def ratios(
    policy: float | None,
    *,
    bound: float,
    achievable: float | None,
    look: float | None,
    static_peak: float | None,
) -> Ratios:
    """All of them.

    Args:
        policy: GPU-hours of the policy. bound: O_LB. achievable: O_SIM. look: O_look.
        static_peak: of the fleet of the peak, held all the time.
    """
    return Ratios(
        to_achievable=over(policy, achievable),
        to_bound=over(policy, bound),
        control=over(policy, look),
        myopia=over(look, achievable),
        captured=captured_saving(policy, static_peak=static_peak, achievable=achievable),
    )


def over(value: float | None, by: float | None) -> float | None:
    """A ratio, None where a side is missing or there is nothing to divide by."""
    return None if value is None or not by else value / by


def captured_saving(
    policy: float | None, *, static_peak: float | None, achievable: float | None
) -> float | None:
    """(static - policy) / (static - O_SIM); None where a static fleet wastes nothing."""
    if policy is None or static_peak is None or achievable is None or static_peak <= achievable:
        return None
    return (static_peak - policy) / (static_peak - achievable)
