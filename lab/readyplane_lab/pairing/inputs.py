"""What the rules of pairing are compared on: workloads, and the fleet that each is played on.

Owns five inputs on one fleet of prefill and decode workers on four machines: the Mooncake conversation
with its ticks spread, a chat of many turns, and these with a slow network, a hot prefix and mixed
hardware. All of an input follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from readyplane.core.profile import LinkClass
from readyplane.core.work import Slo
from readyplane.core.worker import Role
from readyplane_lab.pairing.field import BLOCK_SIZE, Fleet, Place
from readyplane_lab.workload.conversation import Wave, conversation
from readyplane_lab.workload.public import public_trace
from readyplane_lab.workload.request import WorkloadRequest, prompt_hashes
from readyplane_lab.workload.scaling import scaled

FAST, SLOW = "h100-tp4-llama70b", "a100-tp4-llama70b"
NEAR = LinkClass("same-node", 100e9, 0.001)
FAR = LinkClass("rdma-400g", 40e9, 0.003)
SLOW_FAR = LinkClass("ethernet-100g", 8e9, 0.005)
SLO = Slo(2.0, 0.1)
MACHINES = 4
SESSION_TOKENS = 512
"""A prompt goes on with a session when it repeats more than this of it; less is a system prompt."""
HOT_TOKENS, HOT_SHARE = 4096, 0.4
_HOT = 1 << 45


@dataclass(frozen=True, slots=True)
class Input:
    """A workload by seed, and the fleet it meets."""

    name: str
    fleet: Fleet
    requests: Callable[[int], Sequence[WorkloadRequest]]


def inputs(requests_max: int) -> tuple[Input, ...]:
    """All of them, each cut to about so many requests."""
    plain = _fleet()
    mixed = replace(
        plain,
        places=tuple(
            replace(p, profile=SLOW if p.node in ("m2", "m3") else FAST) for p in plain.places
        ),
    )

    def mooncake(seed: int) -> Sequence[WorkloadRequest]:
        trace = public_trace("mooncake_conversation.jsonl.zst", seed=seed).requests
        # Twice as many: those that its 99th percentile is about are few, and the same for all seeds.
        return tuple(scaled(trace, 1.1, seed))[: 2 * requests_max]

    def turns(seed: int, rps: float = 12.0) -> Sequence[WorkloadRequest]:
        wave = Wave(mean_rps=rps, swing=0.3, period_s=60.0)
        span_s = requests_max / rps
        drawn = conversation(
            wave, seed=seed, duration_s=span_s, isl_factor=4.0, continue_probability=0.8
        )
        return tuple(drawn)

    def hot(seed: int) -> Sequence[WorkloadRequest]:
        generator = np.random.Generator(np.random.Philox(key=(seed, _HOT)))
        return [_heated(r) if generator.random() < HOT_SHARE else r for r in turns(seed, 9.0)]

    return (
        Input("mooncake", plain, mooncake),
        Input("turns", plain, turns),
        Input("slow-link", replace(plain, far=SLOW_FAR), turns),
        Input("hot-prefix", plain, hot),
        Input("mixed", mixed, lambda seed: turns(seed, 8.0)),
    )


def sessions_of(requests: Sequence[WorkloadRequest]) -> dict[str, str]:
    """The session of each request by its id, as a client would name it: whose prompt it goes on from."""
    owners: dict[int, str] = {}
    found: dict[str, str] = {}
    for request in requests:
        hashes = prompt_hashes(request, BLOCK_SIZE)
        known = next((h for h in reversed(hashes) if h in owners), None)
        long_enough = known is not None and hashes.index(known) * BLOCK_SIZE > SESSION_TOKENS
        name = f"r{request.index}"
        session = owners[known] if known is not None and long_enough else name
        for one in hashes:
            owners.setdefault(one, session)
        found[name] = session
    return found


def _fleet() -> Fleet:
    places = [
        Place(role, FAST, f"m{machine}")
        for machine in range(MACHINES)
        for role in (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    ]
    return Fleet(tuple(places), NEAR, FAR, SLO)


def _heated(request: WorkloadRequest) -> WorkloadRequest:
    """The same prompt behind a head that many share."""
    return replace(
        request, isl=request.isl + HOT_TOKENS, parts=((_HOT, HOT_TOKENS), *request.parts)
    )
