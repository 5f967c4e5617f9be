"""`make bench-dynosim`: our planner's production brain in Dynamo's own simulator.

Owns the translation of what its scaling hook tells (forward-pass metrics, worker ids, traffic of the
interval) into the sample and the allocations that our planner looks at, and of a decision into
targets. Router, engines, starts and bill are theirs, so that what is compared is the planner alone.

Their hook tells means of a window, our router counts requests one by one: so they are asked for
windows so short that most hold one request at most, and our planner for a decision as often as ever.

The policy is the default one with what the benchmark says: the promise, and how long a start takes.
The last line is `bench-dynosim slo= gpuh=`; fleets that do not change are run beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import dynosim
from bench.validity import trace
from readyplane.core.startup import StartMode, StartSample, WeightTier
from readyplane.core.worker import Role, Worker, WorkerOffer, WorkerState
from readyplane_planner.decide import POOLS, ROLE_OF, Decision, Memory, Plan, decide
from readyplane_planner.policy import Policy, make_plan, read_policy
from readyplane_planner.signals import Allocation, Observation, RouterSample, observe
from readyplane_planner.signals.outside import EngineLoad, EngineSample
from readyplane_planner.starts import StartBook, t_ready

TRACE = "mooncake_conversation.jsonl.zst"
TTFT_S, ITL_S, STARTUP_S = 2.0, 0.05, 30.0
FIRST = (1, 1)
KV_TOKENS = 16_384 * dynosim.BLOCK  # of their default engine
DIGEST = "sha256:" + "0" * 64
KNOWN_MIN = 20
MINUTE_S = 60.0
WINDOW_S = 0.02
STATES = ("active", "starting", "draining")


def default_policy(*, startup_s: float = STARTUP_S) -> Policy:
    """Our default policy, told what the benchmark promises and how long its starts take."""
    start = {"p50_s": startup_s, "p90_s": startup_s, "p99_s": startup_s}
    slo = {"ttft_s": TTFT_S, "tpot_s": ITL_S}
    return read_policy({"model": "dynosim", "slo": slo, "t_ready_prior": start})


# ------------------------------------------------------------------------- translation


@dataclass(slots=True)
class Seat:
    """A worker of theirs under a name of ours."""

    name: str
    decision_id: str = ""
    ordered_s: float = 0.0
    ready_s: float | None = None
    draining_s: float | None = None
    computed: float = 0.0
    generated: float = 0.0
    passes: float = 0.0


@dataclass(slots=True)
class Roster:
    """One pool: whom each of their worker ids stands for.

    They take a number of workers and choose themselves which is new and which goes (the newest). A
    name is an agreement of ours, so whoever goes there gets the name that was to go here.
    """

    pool: str
    seats: dict[int, Seat] = field(default_factory=dict)
    ordered: list[Seat] = field(default_factory=list)
    leaving: set[str] = field(default_factory=set)

    def look(self, tick: Mapping[str, Any], now_s: float) -> list[Seat]:
        """Take their ids of this tick; those that have just become ready."""
        active, starting, draining = (set(tick[f"{s}_{self.pool}_ids"]) for s in STATES)
        for number in sorted((active | starting | draining) - self.seats.keys()):
            first = Seat(f"first-{self.pool}-{number}", ordered_s=now_s)
            self.seats[number] = self.ordered.pop(0) if self.ordered else first
        staying = active | starting
        for number in sorted(self.seats.keys() - staying):
            if self.seats[number].name not in self.leaving:
                self._rename(number, staying)
        for number in self.seats.keys() - staying - draining:
            self.leaving.discard(self.seats.pop(number).name)
        came = [self.seats[n] for n in sorted(active) if self.seats[n].ready_s is None]
        for seat in came:
            seat.ready_s = now_s
        for number in draining & self.seats.keys():
            seat = self.seats[number]
            seat.draining_s = now_s if seat.draining_s is None else seat.draining_s
        return came

    def _rename(self, number: int, staying: set[int]) -> None:
        """A worker went that was to stay: it takes the name of one that was to go and did not."""
        for other in sorted(staying):
            if self.seats[other].name in self.leaving:
                gone, kept = self.seats[number], self.seats[other]
                gone.name, kept.name = kept.name, gone.name
                gone.decision_id, kept.decision_id = kept.decision_id, gone.decision_id
                return


@dataclass(slots=True)
class Totals:
    """What their windows add up to, as our router counts it, and squares of mean prompt lengths."""

    arrivals: float = 0.0
    finished: float = 0.0
    attained: float = 0.0
    prompts: float = 0.0
    outputs: float = 0.0
    generated: float = 0.0
    squares: float = 0.0
    windows: int = 0
    computed: float = 0.0
    arrived_tokens: float = 0.0
    uncached_tokens: float = 0.0


class Translator:
    """Ticks of theirs, one after the other, as samples, allocations and engine readings of ours.

    Latency is told when a request has ended. That counts whether it attained the promise, as with
    our router; quantiles of what is past by then are left unknown. Prompt tokens are told of ended
    requests too, so those of the ones under way are counted where they are: in prefill queues, in
    the pass, in decode's KV. What no cache held follows from the tokens that were computed.
    """

    def __init__(self, plan: Plan) -> None:
        self.rosters = {name: Roster(name) for name in POOLS}
        self.totals = Totals()
        self.started: list[tuple[str, Seat]] = []
        self._plan = plan
        self._decoded_s = 0.0

    def sample(self, tick: Mapping[str, Any]) -> RouterSample:
        """One tick as an answer of our router with readings of the engines; each once, in order."""
        now_s = tick["now_ms"] / 1e3
        self.started = [
            (pool, seat)
            for pool, roster in self.rosters.items()
            for seat in roster.look(tick, now_s)
        ]
        self._count(tick["seen"])
        self._decoded(tick, now_s)
        passes = {pool: _passes(tick, pool) for pool in POOLS}
        decode, prefill = passes["decode"].values(), passes["prefill"].values()
        decoding = sum(p["num_decode_requests"] + p["num_queued_decode"] for p in decode)
        kv = sum(p["sum_decode_kv_tokens"] + p["sum_queued_decode_kv_tokens"] for p in decode)
        totals = self.totals
        under_way = max(0.0, totals.arrivals - totals.finished)
        filling = max(0.0, under_way - decoding)
        # A pass is told of when it ends: of a worker that idles since it is an old one.
        waiting = sum(p["num_queued_prefill"] for p in prefill)
        in_pass = sum(p["num_prefill_requests"] for p in prefill)
        still = min(1.0, max(0.0, filling - waiting) / in_pass) if in_pass else 0.0
        queue = sum(p["sum_queued_prefill_tokens"] for p in prefill)
        computing = still * sum(p["sum_prefill_tokens"] for p in prefill)
        held = still * sum(p["sum_prefill_kv_tokens"] for p in prefill)
        own = max(0.0, totals.generated - totals.outputs)
        through = totals.prompts + max(0.0, kv - own)
        self._arrived(through, queue + computing + held)
        return RouterSample(
            taken_s=now_s,
            incarnation="dynosim",
            uptime_s=now_s,
            counters={
                "arrivals_total": totals.arrivals,
                "arrival_tokens_total": totals.arrived_tokens,
                "arrival_uncached_tokens_total": totals.uncached_tokens,
                "finished_total": totals.finished,
                "attained_total": totals.attained,
                "refused_total": 0.0,  # their router keeps every request, however late
                "aborted_total": 0.0,
            },
            gauges={
                "queued_requests": 0.0,  # their router hands on at once
                "queued_tokens": 0.0,
                "prefilling_requests": filling,
                "prefilling_tokens": queue + computing,
                "decoding_requests": decoding,
                "decoding_kv_tokens": kv,
            },
            workers=tuple(self._workers(tick, passes, now_s)),
            engines=tuple(self._engines(passes, now_s)),
        )

    def allocations(self, now_s: float) -> tuple[Allocation, ...]:
        """Everything that is billed: ready, starting and draining."""
        return tuple(
            Allocation(
                seat.name,
                ROLE_OF[pool],
                "running",
                self._plan.pool(pool).worker_class,
                DIGEST,
                scale_decision_id=seat.decision_id,
                allocated_ago_s=now_s - seat.ordered_s,
                running_ago_s=now_s - seat.ordered_s,
            )
            for pool, roster in self.rosters.items()
            for seat in roster.seats.values()
        )

    def lengths(self, observation: Observation) -> Observation:
        """With the lengths of ended requests, which our router counts in a table.

        The spread of single prompts follows from that of the means over n of them: 1/n of it.
        """
        totals = self.totals
        if totals.finished < KNOWN_MIN or totals.windows < KNOWN_MIN:
            return observation
        mean = totals.prompts / totals.finished
        variance = (totals.squares - totals.finished * mean * mean) / (totals.windows - 1)
        cv2 = min(4.0, max(0.1, variance / (mean * mean)))
        osl = max(1.0, totals.outputs / totals.finished)
        known = replace(observation.lengths, osl=osl, isl_cv2=cv2, known=True)
        return replace(observation, lengths=known)

    def targets(self, decision: Decision, tick: Mapping[str, Any]) -> dict[str, float]:
        """What is ordered and given up, as the number of workers that each pool shall have."""
        now_s = tick["now_ms"] / 1e3
        found: dict[str, float] = {}
        for pool, roster in self.rosters.items():
            mine = [o for o in decision.orders if o.pool == pool]
            roster.ordered = [Seat(o.worker_id, decision.decision_id, now_s) for o in mine]
            staying = [*tick[f"active_{pool}_ids"], *tick[f"starting_{pool}_ids"]]
            names = {roster.seats[n].name for n in staying}
            told = {drain.worker_id for drain in decision.drains if drain.pool == pool}
            told |= {release.worker_id for release in decision.releases if release.pool == pool}
            told &= names
            roster.leaving |= told
            found[f"target_{pool}"] = len(names) - len(told) + len(mine)
        return found

    def _count(self, seen: Mapping[str, Any]) -> None:
        """Add what was seen since the last tick."""
        totals = self.totals
        totals.arrivals += seen["arrived"]
        totals.generated += seen["generated"]
        for ended, isl, osl, ttft_ms, itl_ms in seen["ended"]:
            # Of several that ended together only means are told: as many are late as could be.
            late = min(ended, (ttft_ms or 0.0) * ended // (1e3 * TTFT_S))
            slow = ended if (itl_ms or 0.0) > 1e3 * ITL_S else 0
            totals.finished += ended
            totals.attained += ended - max(late, slow)
            totals.prompts += ended * isl
            totals.outputs += ended * osl
            totals.squares += ended * isl**2
            totals.windows += 1
        for pool, number, tokens, _ in seen["passes"]:
            totals.computed += tokens
            seat = self.rosters[pool].seats.get(number)
            if seat is not None:  # else it went meanwhile
                seat.computed += tokens

    def _decoded(self, tick: Mapping[str, Any], now_s: float) -> None:
        """Counters of the decode engines: passes by how long those took that were seen."""
        passes = _passes(tick, "decode")
        running = sum(p["num_decode_requests"] for p in passes.values())
        since_s, self._decoded_s = now_s - self._decoded_s, now_s
        for number, seat in self.rosters["decode"].seats.items():
            one = passes.get(number)
            took = [
                s for pool, n, _, s in tick["seen"]["passes"] if (pool, n) == ("decode", number)
            ]
            if one is None or not one["num_decode_requests"] or not any(took):
                continue
            seat.passes += since_s * len(took) / sum(took)
            seat.generated += tick["seen"]["generated"] * one["num_decode_requests"] / running

    def _arrived(self, through: float, within: float) -> None:
        """Prompt tokens that are past prefill, and those that are there; a counter never falls."""
        totals = self.totals
        more = max(0.0, through + within - totals.arrived_tokens)
        fresh = min(1.0, totals.computed / through) if through > 0 else 1.0
        totals.arrived_tokens += more
        totals.uncached_tokens += more * fresh

    def _workers(
        self, tick: Mapping[str, Any], passes: Mapping[str, Mapping[int, Any]], now_s: float
    ) -> list[Worker]:
        found = []
        for pool, roster in self.rosters.items():
            role, serving = ROLE_OF[pool], self._plan.pool(pool).worker_class
            states = dict.fromkeys(tick[f"active_{pool}_ids"], WorkerState.READY)
            states |= dict.fromkeys(tick[f"draining_{pool}_ids"], WorkerState.DRAINING)
            for number, state in sorted(states.items()):
                seat, one = roster.seats[number], passes[pool].get(number)
                offer = WorkerOffer(
                    seat.name,
                    f"{seat.name}/1",
                    role,
                    "dynosim",
                    serving,
                    manifest_digest=DIGEST,
                    scale_decision_id=seat.decision_id,
                )
                found.append(
                    Worker(
                        offer,
                        1,
                        state,
                        ready_s=seat.ready_s,
                        draining_s=seat.draining_s,
                        renewed_s=now_s,
                        active=0 if one is None else round(_running(one, role)),
                    )
                )
        return found

    def _engines(self, passes: Mapping[str, Mapping[int, Any]], now_s: float) -> list[EngineSample]:
        found = []
        for pool, roster in self.rosters.items():
            role = ROLE_OF[pool]
            for number, one in sorted(passes[pool].items()):
                seat = roster.seats.get(number)
                if seat is None:
                    continue
                kv = float(one["sum_decode_kv_tokens"] + one["sum_prefill_kv_tokens"])
                load = EngineLoad(
                    running=round(_running(one, role)),
                    waiting=round(one["num_queued_prefill"] + one["num_queued_decode"]),
                    waiting_prefill_tokens=round(one["sum_queued_prefill_tokens"]),
                    kv_usage=kv / KV_TOKENS,
                    kv_tokens=kv,
                    kv_capacity_tokens=float(KV_TOKENS),
                    decode_tokens_total=seat.generated if role is Role.DECODE else None,
                    prefill_tokens_total=seat.computed if role is Role.PREFILL else None,
                    iterations_total=seat.passes if role is Role.DECODE else None,
                )
                # Names may change hands (see Roster), and counters do not go with them.
                found.append(EngineSample(seat.name, f"{seat.name}/1", str(number), now_s, load))
        return found


def _passes(tick: Mapping[str, Any], pool: str) -> dict[int, Mapping[str, Any]]:
    """The last pass of each worker, by its id."""
    return {one["worker_id"]: one for one in tick[f"{pool}_fpm_snapshots"]}


def _running(one: Mapping[str, Any], role: Role) -> float:
    return float(one["num_prefill_requests" if role is Role.PREFILL else "num_decode_requests"])


# ------------------------------------------------------------------------- the planner


@dataclass(frozen=True, slots=True)
class Moment:
    """One tick: what was there, what was wanted, and why."""

    at_s: float
    ready: tuple[int, int]
    starting: tuple[int, int]
    targets: tuple[int, int]
    decision: Decision


class Planner:
    """Their scaling policy, answered by our brain: tick in, targets out."""

    def __init__(self, policy: Policy) -> None:
        self.plan = make_plan(policy, version=1, manifest_digest=DIGEST)
        self.moments: list[Moment] = []
        self._policy = policy
        self._translator = Translator(self.plan)
        self._memory = Memory()
        self._previous: RouterSample | None = None
        self._book = StartBook()

    def observe(self, tick: Mapping[str, Any]) -> Observation:
        """The tick as our planner sees it; each once, in order."""
        sample, now_s = self._translator.sample(tick), tick["now_ms"] / 1e3
        for pool, seat in self._translator.started:
            if seat.decision_id:
                worker_class, took_s = self.plan.pool(pool).worker_class, now_s - seat.ordered_s
                tier, mode = WeightTier.UNKNOWN, StartMode(self.plan.start_mode)
                start = StartSample(worker_class, tier, mode, 0.0, took_s, now_s)
                self._book.add(ROLE_OF[pool], start)
        observation = observe(
            model=self.plan.model,
            previous=self._previous,
            current=sample,
            allocations=self._translator.allocations(now_s),
            t_ready=t_ready(self._book, self.plan, prior=self._policy.t_ready, now_s=now_s),
            priors=self._policy.priors,
            now_s=now_s,
        )
        self._previous = sample
        return self._translator.lengths(observation)

    def on_tick(self, tick: Mapping[str, Any]) -> dict[str, float]:
        """See `bench/dynosim_replay.py`."""
        now_s = tick["now_ms"] / 1e3
        observation = self.observe(tick)
        decision, self._memory = decide(
            observation,
            self.plan,
            self._memory,
            now_s=now_s,
            decision_id=f"d{round(now_s)}-{len(self.moments):06d}",
        )
        targets = self._translator.targets(decision, tick)
        both = (int(targets["target_prefill"]), int(targets["target_decode"]))
        ready = (tick["active_prefill_count"], tick["active_decode_count"])
        starting = (tick["starting_prefill_count"], tick["starting_decode_count"])
        self.moments.append(Moment(now_s, ready, starting, both, decision))
        return targets


# ------------------------------------------------------------------------- runs


@dataclass(frozen=True, slots=True)
class Ran:
    """One run. `attained`, `at_s`: of each request; `gpu_hours`: as their report bills it."""

    name: str
    slo: float
    gpu_hours: float
    at_s: Sequence[float]
    ttft_s: Sequence[float]
    itl_s: Sequence[float]
    moments: Sequence[Moment] = ()

    def row(self) -> str:
        """One line of the table."""
        late = sum(t > TTFT_S for t in self.ttft_s)
        slow = sum(i > ITL_S for i in self.itl_s)
        return f"| {self.name} | {self.slo:.4f} | {self.gpu_hours:.2f} | {late} | {slow} |"

    def minutes(self) -> list[str]:
        """(minute, requests, late, workers ready at its ticks), one line each where any was late."""
        lines = []
        for minute in range(int(max(self.at_s) // MINUTE_S) + 1):
            rows = [k for k, at_s in enumerate(self.at_s) if int(at_s // MINUTE_S) == minute]
            late = sum(self.ttft_s[k] > TTFT_S or self.itl_s[k] > ITL_S for k in rows)
            seen = [m for m in self.moments if int(m.at_s // MINUTE_S) == minute]
            ready = sum(m.ready[0] for m in seen) / len(seen) if seen else float("nan")
            lines.append(f"minute {minute}: {len(rows)} requests, {late} late, {ready:.1f}P ready")
        return lines


def play(
    trace_file: Path,
    name: str,
    *,
    fleet: tuple[int, int] = FIRST,
    policy: Policy | None = None,
    targets: Sequence[tuple[float, int, int]] = (),
    startup_s: float = STARTUP_S,
) -> Ran:
    """One run of the trace: under our planner where a policy is given, else by a script."""
    planner = None if policy is None else Planner(policy)
    windows = {"window_ms": 1e3 * WINDOW_S}
    if planner is not None:
        windows["tick_ms"] = 1e3 * planner.plan.tick_s
    found = dynosim.run(
        {
            "trace": str(trace_file),
            "fleet": fleet,
            "targets": [(s * 1e3, p, d) for s, p, d in targets],
            "planner": None if planner is None else windows,
            "slo": (1e3 * TTFT_S, 1e3 * ITL_S),
            **{kind: _engine(kind, startup_s) for kind in POOLS},
        },
        on_tick=None if planner is None else planner.on_tick,
    )
    summary, rows = found["summary"], found["requests"]
    return Ran(
        name,
        summary["goodput_completed_requests"] / summary["num_requests"],
        summary["gpu_hours"],
        [v / 1e3 for v in rows["arrival_time_ms"]],
        [v / 1e3 for v in rows["ttft_ms"]],
        [(v or 0.0) / 1e3 for v in rows["itl_ms"]],
        () if planner is None else planner.moments,
    )


def _engine(kind: str, startup_s: float) -> dict[str, Any]:
    """Their engine as it ships, polynomial in time; one GPU a worker."""
    engine = {"worker_type": kind, "block_size": dynosim.BLOCK, "emit_kv_events": kind == "prefill"}
    return {"engine": engine, "startup_time": startup_s}


def _timeline(ran: Ran) -> None:
    before: tuple[int, int] | None = None
    for moment in ran.moments:
        if moment.targets != before:
            p, d = moment.targets
            why = ", ".join(dict.fromkeys(r.code for r in moment.decision.why))
            print(f"{moment.at_s:7.0f} s -> {p}P{d}D: {why}")
            before = moment.targets
    print("\n".join(ran.minutes()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dynosim_planner", description=__doc__)
    parser.add_argument("--only", action="store_true", help="no fleets beside ours")
    parser.add_argument("--timeline", action="store_true", help="each change, and each minute")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace_file = Path(folder) / "trace.jsonl"
        try:
            dynosim.write_trace(trace(TRACE), trace_file)
            print("| case | attained | GPU-hours | TTFT late | ITL slow |\n|---|---|---|---|---|")
            if not asked.only:
                print(play(trace_file, "static 2P1D", fleet=(2, 1)).row(), flush=True)
                grown = [(0.0, 3, 1)]
                print(play(trace_file, "1P1D, 3P1D from 0 s on", targets=grown).row(), flush=True)
            ours = play(trace_file, "Readyplane, default policy", policy=default_policy())
        except FileNotFoundError as error:
            print(f"left out: {error}\nbench-dynosim slo=nan gpuh=nan")
            return
        print(ours.row())
        if asked.timeline:
            _timeline(ours)
    print(f"\nbench-dynosim slo={ours.slo:.4f} gpuh={ours.gpu_hours:.3f}")


if __name__ == "__main__":
    main()
