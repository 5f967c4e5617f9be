"""What would be decided if the load, the starts, the fleet or the policy were otherwise.

Owns the keys that may be asked for and what each changes in the inputs of a decision. The brain is
the same one; nothing is ordered. A changed load is meant as if it had been so all along: work that
arrives, its forecast and its mean lengths are scaled together, the queue of now stays. Pure.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from readyplane.core.errors import InvalidField, UnknownField
from readyplane.core.startup import StartQuantiles
from readyplane.core.worker import WorkerState
from readyplane_planner import forecast
from readyplane_planner.decide import POOLS, ROLE_OF, Decision, Plan
from readyplane_planner.decide.demand import mean_lengths, mean_output
from readyplane_planner.explain import candidate_lines, expectation_lines
from readyplane_planner.journal import Inputs, decided, decision_document
from readyplane_planner.policy import Policy, merged
from readyplane_planner.signals import Signal, WorkerView, clients
from readyplane_planner.yaml_text import read_yaml

KEYS = {
    "rps": "requests a second",
    "isl": "mean prompt tokens",
    "osl": "mean output tokens",
    "hit": "share of prompt tokens found in a prefix cache, 0 to 1",
    "queue": "prompt tokens that wait",
    "tready": "median seconds from order to ready, of both pools",
    "tready.prefill": "of the prefill pool",
    "tready.decode": "of the decode pool",
    "workers.prefill": "ready prefill workers",
    "workers.decode": "ready decode workers",
    "policy.FIELD": "any field of the policy by its dotted name, as policy.headroom=0.3",
}
POLICY = "policy."
FACTOR_MAX = 1000.0
WORKERS_MAX = 1024
AGE_S = 1e6
PlanOf = Callable[[Policy], Plan]


@dataclass(frozen=True, slots=True)
class Change:
    """One change: a factor of what is now, or a value that takes its place."""

    key: str
    text: str
    factor: float | None = None
    value: Any = None

    def of(self, now: float) -> float:
        """The new value."""
        return now * self.factor if self.factor is not None else float(self.value)

    def ratio(self, now: float | None) -> float:
        """New over old.

        Raises:
            InvalidField: there is nothing now that a factor could be taken of.
        """
        if self.factor is not None:
            return self.factor
        if not now:
            remedy = "there is none of it now to compare with; ask again while there is load"
            raise InvalidField(self.key, self.text, remedy)
        return float(self.value) / now


def read_changes(given: Mapping[str, str]) -> tuple[Change, ...]:
    """Checked changes: `2x` or `+30%` of what is now, or a number; policy fields take YAML.

    Raises:
        UnknownField: a key that does not exist. InvalidField: a value that is none.
    """
    if not given:
        raise InvalidField("what-if", "", f"name a change, such as isl=2x; known: {_known()}")
    return tuple(_change(key.strip(), text.strip()) for key, text in given.items())


def _known() -> str:
    return ", ".join(KEYS)


def _change(key: str, text: str) -> Change:
    if key == f"{POLICY}model":
        raise InvalidField(key, text, "leave it out; a planner plans one model, ask that one's")
    if key.startswith(POLICY) and key != POLICY:
        return Change(key, text, value=read_yaml(text, field=key, value=text))
    if key not in KEYS:
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UnknownField(key, text, f"{hint}known: {_known()}")
    change = _number(key, text)
    amount = change.factor if change.factor is not None else change.value
    if not math.isfinite(amount) or amount < 0:
        raise InvalidField(key, text, "give a number that is not negative")
    if change.factor is not None and change.factor > FACTOR_MAX:
        raise InvalidField(key, text, f"give {FACTOR_MAX:g}x at most")
    if key == "hit" and change.factor is None and amount > 1:
        raise InvalidField(key, text, "give a share from 0 to 1")
    if key.startswith("workers.") and change.factor is None and amount > WORKERS_MAX:
        raise InvalidField(key, text, f"give {WORKERS_MAX} workers at most")
    if key.startswith("workers.") and change.factor is None and amount != int(amount):
        raise InvalidField(key, text, "give a whole number of workers")
    if key in {"rps", "isl", "osl"} and amount == 0:
        raise InvalidField(key, text, "give more than 0")
    return change


def _number(key: str, text: str) -> Change:
    remedy = "write a factor (2x), a change (+30%) or a number"
    try:
        if text.endswith(("x", "X", "×")):
            return Change(key, text, factor=float(text[:-1]))
        if text.endswith("%") and text[:1] in "+-":
            return Change(key, text, factor=1.0 + float(text[:-1]) / 100.0)
        return Change(key, text, value=float(text))
    except ValueError as error:
        raise InvalidField(key, text, remedy) from error


# --------------------------------------------------------------------------- the answer


@dataclass(frozen=True, slots=True)
class Question:
    """Changed inputs and policy, what each change did, and what a reader has to know."""

    inputs: Inputs
    policy: Policy
    told: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...]


def compared(inputs: Inputs, question: Question, then: Decision) -> dict[str, Any]:
    """The decision of the inputs as they were beside `then`, with what differs and why."""
    now, _memory = decided(inputs)
    sides = {"as_is": _side(now), "what_if": _side(then)}
    differences = [
        {"pool": pool, "field": field, "as_is": was, "what_if": would}
        for pool in POOLS
        for field in sides["as_is"][pool]
        if (was := sides["as_is"][pool][field]) != (would := sides["what_if"][pool][field])
    ]
    answer = {
        "model": inputs.plan.model,
        "decision_id": inputs.decision_id,
        "changes": list(question.told),
        "notes": list(question.notes),
        **sides,
        "differences": differences,
    }
    return {**answer, "text": text_of(answer)}


def _side(decision: Decision) -> dict[str, Any]:
    """One decision in the figures that are compared."""
    document = decision_document(decision, at_s=0.0, leader_epoch=0, inputs_digest="")
    side: dict[str, Any] = {
        pool: {
            "before": found.before,
            "wanted": found.wanted,
            "keep": found.keep,
            "target": found.target,
            "ordered": sum(o.pool == pool for o in decision.orders),
            "drained": sum(d.pool == pool for d in decision.drains),
            "demand": found.forecast.level,
            "demand_upper": found.forecast.upper,
            "horizon_s": found.forecast.horizon_s,
            "worker_rate": found.worker_rate,
            "load": found.load.value,
            "t_ready_p90_s": found.t_ready.p90_s,
        }
        for pool in POOLS
        for found in (decision.pool(pool),)
    }
    for name in ("summary", "reasons", "binding", "candidates", "expected", "infeasible"):
        side[name] = document[name]
    return side


def text_of(answer: Mapping[str, Any]) -> str:
    """The comparison for a terminal."""
    lines = [f"what if {', '.join(c['text'] for c in answer['changes'])}"]
    lines += [f"  {c['key']}: {_amount(c['from'])} → {_amount(c['to'])}" for c in answer["changes"]]
    lines += [f"  note: {note}" for note in answer["notes"]]
    for pool in POOLS:
        now, then = answer["as_is"][pool], answer["what_if"][pool]
        lines.append(f"{pool}: {_pool_line(now)}")
        lines.append(f"  what if: {_pool_line(then)}")
        if now["wanted"] == then["wanted"] and now["target"] == then["target"]:
            lines.append("  no difference in workers")
            continue
        lines.append(f"  {_moved(now, then)}")
        lines += [f"  because {text}" for text in _because(answer["what_if"]["reasons"], pool)]
    side = answer["what_if"]
    lines += [f"weighed: {line}" for line in candidate_lines(side)]
    lines += [f"expected: {line}" for line in expectation_lines(side)]
    lines.append(f"as it is: {answer['as_is']['summary']}")
    lines.append(f"what if:  {side['summary']}")
    return "\n".join(lines)


def _pool_line(pool: Mapping[str, Any]) -> str:
    load = "not known" if pool["load"] is None else f"{pool['load']:.2f}"
    return (
        f"has {pool['before']}, wants {_amount(pool['wanted'])}, target of this tick "
        f"{pool['target']}; demand {pool['demand']:,.0f} to {pool['demand_upper']:,.0f} tokens/s "
        f"over {pool['horizon_s']:.0f} s at {pool['worker_rate']:,.0f} a worker; load {load}"
    )


def _moved(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """The difference in workers, and which of its causes moved by how much."""
    causes = [
        f"{label} {then[name] / now[name]:.2f}x"
        for name, label in (
            ("demand_upper", "demand"),
            ("worker_rate", "rate of a worker"),
            ("horizon_s", "horizon"),
        )
        if now[name] and then[name] != now[name]
    ]
    wants = f"wants {_amount(then['wanted'])} instead of {_amount(now['wanted'])}"
    if then["target"] != now["target"]:
        wants += f", target {then['target']} instead of {now['target']}"
    return f"{wants}: {', '.join(causes) or 'by its rules alone'}"


def _because(reasons: Sequence[Mapping[str, Any]], pool: str) -> list[str]:
    own = [f"{r['text']} [{r['code']}]" for r in reasons if r["pool"] == pool]
    return own[:3] or [f"{r['text']} [{r['code']}]" for r in reasons[:1]]


def _amount(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "not known" if value is None else str(value)


# --------------------------------------------------------------------------- applying


def applied(
    inputs: Inputs, changes: Sequence[Change], *, policy: Policy, plan_of: PlanOf
) -> Question:
    """The inputs under the changes.

    Args:
        inputs: of a decision that was taken. policy: in force then; `plan_of` makes its plan.

    Raises:
        InvalidField: a change that cannot be made; UnknownField: of a policy field.
    """
    told: list[dict[str, Any]] = []
    notes: list[str] = []
    loads = False
    for change in changes:
        if change.key.startswith(POLICY):
            continue
        before, after, inputs = _APPLY[change.key.partition(".")[0]](inputs, change)
        told.append(_told(change, before, after))
        loads = loads or not change.key.startswith("tready")
    if loads:
        inputs = replace(inputs, observation=replace(inputs.observation, latency={}))
        notes.append("measured latencies are those of the real load: only predicted ones count")
        waiting = inputs.observation.queue.get()
        if waiting > 0 and not any(c.key == "queue" for c in changes):
            notes.append(f"the {waiting:,.0f} prompt tokens that wait now are left as they are")
    fields = [c for c in changes if c.key.startswith(POLICY)]
    if fields:
        inputs, policy, more = _policy(inputs, fields, policy, plan_of)
        told += more
        if any("t_ready_prior" in c.key for c in fields):
            notes.append("policy.t_ready_prior counts only until starts were measured; see tready")
    # What a foreign optimiser answered to the real inputs is no answer to these.
    return Question(replace(inputs, answer=None), policy, tuple(told), tuple(notes))


def _told(change: Change, before: Any, after: Any) -> dict[str, Any]:
    text = f"{change.key}={change.text}"
    return {"key": change.key, "text": text, "from": before, "to": after}


Applied = tuple[float | None, float, Inputs]


def _rps(inputs: Inputs, change: Change) -> Applied:
    seen, memory = inputs.observation, inputs.memory
    now = seen.arrivals.value
    k = change.ratio(now)
    flow = ("arrivals", "prompt_work", "prefill_work", "finished", "generated")
    held = ("in_flight", "decoding", "remaining", "kv")
    signals: dict[str, Any] = {n: _times(getattr(seen, n), k) for n in (*flow, *held)}
    averages = memory.averages
    names = ("requests", "tokens", "uncached", "finished", "generated")
    memory = replace(
        memory,
        work_p=forecast.scaled(memory.work_p, k),
        work_d=forecast.scaled(memory.work_d, k),
        apart_p=forecast.scaled_apart(memory.apart_p, k),
        apart_d=forecast.scaled_apart(memory.apart_d, k),
        averages=replace(averages, **{n: getattr(averages, n) * k for n in names}),
    )
    after = change.of(0.0 if now is None else now)
    seen = clients.scaled(replace(seen, **signals), arrivals=k, prefill_work=k)
    return now, after, replace(inputs, observation=seen, memory=memory)


def _isl(inputs: Inputs, change: Change) -> Applied:
    now, uncached = mean_lengths(inputs.observation, inputs.memory.averages)
    k = change.ratio(now)
    seen, averages = inputs.observation, inputs.memory.averages
    observation = replace(seen, prompt_work=_times(seen.prompt_work, k))
    observation = replace(observation, lengths=replace(seen.lengths, isl=seen.lengths.isl * k))
    memory = replace(inputs.memory, averages=replace(averages, tokens=averages.tokens * k))
    inputs = replace(inputs, observation=observation, memory=memory)
    return now, now * k, _uncached(inputs, k if uncached > 0 else 1.0)


def _hit(inputs: Inputs, change: Change) -> Applied:
    isl, uncached = mean_lengths(inputs.observation, inputs.memory.averages)
    now = 1.0 - uncached / isl
    after = change.of(now)
    if after > 1.0:
        raise InvalidField(change.key, change.text, f"it is {now:.2f} now and 1 at most")
    # Even a whole hit computes its last token.
    wanted = max(1.0, isl * (1.0 - after))
    return now, after, _uncached(inputs, wanted / uncached)


def _uncached(inputs: Inputs, k: float) -> Inputs:
    """Prompt tokens that have to be computed, times k."""
    seen, memory = inputs.observation, inputs.memory
    lengths = replace(seen.lengths, uncached=seen.lengths.uncached * k)
    averages = replace(memory.averages, uncached=memory.averages.uncached * k)
    work = _times(seen.prefill_work, k)
    seen = clients.scaled(replace(seen, prefill_work=work, lengths=lengths), prefill_work=k)
    memory = replace(
        memory,
        averages=averages,
        work_p=forecast.scaled(memory.work_p, k),
        apart_p=forecast.scaled_apart(memory.apart_p, k),
    )
    return replace(inputs, observation=seen, memory=memory)


def _osl(inputs: Inputs, change: Change) -> Applied:
    now = mean_output(inputs.observation, inputs.memory.averages)
    k = change.ratio(now)
    seen, memory = inputs.observation, inputs.memory
    more = seen.decoding.get() * (k - 1.0)
    running = seen.in_flight
    if running.value is not None:
        running = replace(running, value=max(0.0, running.value + more))
    names = ("generated", "decoding", "remaining", "kv")
    signals: dict[str, Any] = {n: _times(getattr(seen, n), k) for n in names}
    observation = replace(
        seen,
        **signals,
        in_flight=running,
        lengths=replace(seen.lengths, osl=seen.lengths.osl * k),
    )
    memory = replace(
        memory,
        averages=replace(memory.averages, generated=memory.averages.generated * k),
        work_d=forecast.scaled(memory.work_d, k),
        apart_d=forecast.scaled_apart(memory.apart_d, k),
    )
    return now, now * k, replace(inputs, observation=observation, memory=memory)


def _queue(inputs: Inputs, change: Change) -> Applied:
    signal = inputs.observation.queue
    if not signal.known:
        raise InvalidField(change.key, change.text, f"the queue is not known now: {signal.why}")
    now = signal.get()
    after = change.of(now)
    observation = replace(inputs.observation, queue=replace(signal, value=after))
    return now, after, replace(inputs, observation=observation)


def _tready(inputs: Inputs, change: Change) -> Applied:
    """The median as asked; the other quantiles in proportion, as those starts spread."""
    pools = [p for p in POOLS if change.key in {"tready", f"tready.{p}"}]
    starts = dict(inputs.observation.t_ready)
    now = starts[pools[0]].p50_s
    after = change.of(now)
    if after <= 0:
        raise InvalidField(change.key, change.text, "give more than 0 seconds")
    for key, q in inputs.observation.t_ready.items():
        # A key of a class or mode begins with its pool; those starts change alike.
        if key.partition("/")[0] in pools:
            usual_s = inputs.observation.t_ready[key.partition("/")[0]].p50_s
            k = change.of(usual_s) / usual_s if usual_s > 0 else 1.0
            starts[key] = StartQuantiles(q.p50_s * k, q.p90_s * k, q.p99_s * k, q.count, q.age_s)
    observation = replace(inputs.observation, t_ready=starts)
    return now, after, replace(inputs, observation=observation)


def _workers(inputs: Inputs, change: Change) -> Applied:
    """Ready workers added like those that are there, or taken away, the last ones first."""
    pool = change.key.partition(".")[2]
    role, seen, memory = ROLE_OF[pool], inputs.observation, inputs.memory
    ready = [
        w
        for w in seen.workers
        if w.role.serves(role) and w.state is WorkerState.READY and not w.unpairable
    ]
    now, wanted = len(ready), round(change.of(len(ready)))
    gone = {w.worker_id for w in ready[wanted:]}
    plan = inputs.plan.pool(pool)
    like = ready[0] if ready else WorkerView("", "", role, WorkerState.READY, plan.worker_class)
    added = tuple(
        replace(
            like,
            worker_id=f"what-if-{pool[0]}-{place}",
            incarnation=f"what-if-{place}",
            manifest_digest=like.manifest_digest or inputs.plan.manifest_digest,
            ready_age_s=AGE_S,
            active=0,
            promised_prefill_tokens=0,
            promised_kv_blocks=0,
            prefill_rate=None,
            iteration_s=None,
        )
        for place in range(max(0, wanted - now))
    )
    workers = tuple(w for w in seen.workers if w.worker_id not in gone) + added
    held = tuple(a for a in seen.allocations if a.worker_id not in gone)
    guarded = memory.guard(pool)
    desired = None if guarded.desired is None else max(0, guarded.desired + wanted - now)
    guarded = replace(guarded, desired=desired)
    if pool == "prefill":
        memory = replace(memory, guard_p=guarded)
    else:
        memory = replace(memory, guard_d=guarded)
    observation = replace(seen, workers=workers, allocations=held)
    return float(now), float(wanted), replace(inputs, observation=observation, memory=memory)


_APPLY: Mapping[str, Callable[[Inputs, Change], Applied]] = {
    "rps": _rps,
    "isl": _isl,
    "osl": _osl,
    "hit": _hit,
    "queue": _queue,
    "tready": _tready,
    "workers": _workers,
}


def _policy(
    inputs: Inputs, changes: Sequence[Change], policy: Policy, plan_of: PlanOf
) -> tuple[Inputs, Policy, list[dict[str, Any]]]:
    """The plan of the changed policy; a pause that is not asked about stays."""
    wanted: dict[str, Any] = {}
    for change in changes:
        place = wanted
        *above, leaf = change.key.removeprefix(POLICY).split(".")
        for part in above:
            place = place.setdefault(part, {})
        place[leaf] = change.value
    after = merged(policy, wanted)
    before_document, after_document = policy.document(), after.document()
    plan = replace(plan_of(after), manifest_digest=inputs.plan.manifest_digest)
    if "paused" not in wanted:
        plan = replace(plan, paused=inputs.plan.paused)
    told = [
        _told(
            c,
            _at(before_document, c.key.removeprefix(POLICY)),
            _at(after_document, c.key.removeprefix(POLICY)),
        )
        for c in changes
    ]
    return replace(inputs, plan=plan), after, told


def _at(document: Any, name: str) -> Any:
    for part in name.split("."):
        document = document.get(part) if isinstance(document, Mapping) else None
    return document


def _times(signal: Signal, k: float) -> Signal:
    return signal if signal.value is None else replace(signal, value=signal.value * k)
