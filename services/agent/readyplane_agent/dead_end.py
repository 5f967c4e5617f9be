"""Which failures the same start would meet again wherever it is made (B132).

Owns the judgement alone: it goes with the failure to the router, and the planner stops ordering what
would fail alike. What another node, another try or some time may cure is none.
"""

from __future__ import annotations

from readyplane.core.errors import BytesMissing, IdentityMismatch, Refused
from readyplane_agent.engines.offers import NotOffered
from readyplane_agent.no_source import BytesNowhere

BYTES, IDENTITY, TRUST = "bytes", "identity", "trust"
CANARY_MISSING = "canary_missing"
NOT_OFFERED = "not_offered"
CANARY = "canary"
"""What a refusal is of whose artifact has no known answer."""


def dead_end(error: BaseException) -> str:
    """`bytes`: wrong or missing at every source. `identity`: not what was ordered. `trust`: not
    signed as the policy asks. `canary_missing`: no known answer, without which nobody is admitted.
    `not_offered`: the engine cannot what it was ordered to, of whatever artifact. Empty for
    everything else.
    """
    if isinstance(error, BytesNowhere | BytesMissing):
        return BYTES
    if isinstance(error, IdentityMismatch):
        return IDENTITY
    if isinstance(error, Refused) and error.what == "trust":
        return TRUST
    if isinstance(error, Refused) and error.what == CANARY:
        return CANARY_MISSING
    if isinstance(error, NotOffered):
        return NOT_OFFERED
    return ""
