"""A world for tests of the `readyplane` command: fake services behind the ports, a clean environment."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import Conflict, NotFound, ReadyplaneError, UnknownField
from readyplane.core.identity import KvFormat
from readyplane.core.startup import Segment, SegmentName, WeightTier
from readyplane.core.work import RequestShape
from readyplane.core.worker import (
    Fleet,
    LoadReport,
    Role,
    Serving,
    StartProgress,
    Worker,
    WorkerOffer,
    WorkerState,
)
from readyplane.ports import End, Pair
from readyplane_lab.cli.__main__ import main

KV = KvFormat(
    model_digest="sha256:" + "a" * 64,
    dtype="fp8",
    block_size=16,
    layout="HND",
    engine_version="modelled/1",
)
CLUSTER = ("--router", "10.0.0.1:7001")


@dataclass
class Said:
    """What one command came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Its one JSON document; fails when stdout holds anything else."""
        return json.loads(self.out)


class Terminal:
    """Runs commands in this process and takes what they print."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *argv: str) -> Said:
        self._capfd.readouterr()
        code = main(list(argv))
        out, err = self._capfd.readouterr()
        return Said(code, out, err)


def clean_environment(monkeypatch: pytest.MonkeyPatch, state: Path) -> None:
    for name in list(os.environ):
        if name.startswith("READYPLANE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def worker(
    worker_id: str = "p-1-aaaa",
    state: WorkerState = WorkerState.READY,
    role: Role = Role.PREFILL,
    **changes: Any,
) -> Worker:
    """A worker whose start took 5 s: 1 s of import, 3 s of transfer, 1 s of canary."""
    segments = (
        Segment(SegmentName.RUNTIME_IMPORT, 100.0, 101.0),
        Segment(SegmentName.WEIGHT_TRANSFER, 101.0, 104.0),
        Segment(SegmentName.CANARY, 104.0, 105.0 if state is not WorkerState.PROVISIONED else None),
    )
    offer = WorkerOffer(
        worker_id=worker_id,
        incarnation=f"{worker_id}-x",
        role=role,
        model="demo",
        worker_class="h200-slow10",
        manifest_digest=KV.model_digest,
        scale_decision_id="d1790000000-aaaa",
    )
    serving = Serving(
        "http://127.0.0.1:9", KV, 1000, 16, 8192, "h200-slow10", tier=WeightTier.L4_OBJECT
    )
    made = Worker(
        offer=offer,
        epoch=7,
        state=state,
        serving=None if state is WorkerState.PROVISIONED else serving,
        progress=StartProgress(start_s=100.0, now_s=106.0, segments=segments, log_tail="loading"),
        load=LoadReport(kv_used_blocks=250, kv_total_blocks=1000),
        active=3,
    )
    return replace(made, **changes)


def fleet(*workers: Worker, degraded: str = "") -> Fleet:
    return Fleet(version=4, workers={w.worker_id: w for w in workers}, degraded=degraded)


EXPLANATION = {
    "isl": 1200,
    "slo": {"ttft_s": 2.0, "tpot_s": 0.1},
    "pairs": [
        {
            "prefill": "p-1-aaaa",
            "decode": "d-1-bbbb",
            "local": False,
            "prefill_cached_tokens": 160,
            "decode_cached_tokens": 0,
            "terms": {
                "queue_s": 0.1,
                "prefill_s": 0.4,
                "transfer_s": 0.003,
                "first_iteration_s": 0.06,
                "tpot_s": 0.07,
                "decode_s": 9.0,
                "slowdown_s": 1.0,
                "stall_s": 0.0,
                "ttft_s": 0.563,
                "cost_s": 10.5,
            },
        }
    ],
    "candidates": 1,
    "excluded": {"decode:d-2-cccc": "12 KV blocks free"},
}


@dataclass
class FakeRouter:
    """The part of `ports.Router` that commands call; `error` is raised by every call."""

    now: Fleet = field(default_factory=fleet)
    error: ReadyplaneError | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    after_drain: Sequence[Fleet] = ()
    on_look: Callable[[int], None] = lambda _: None
    looks: int = 0

    async def list_workers(self, model: str = "") -> Fleet:
        self.looks += 1
        self.on_look(self.looks)
        if self.error is not None:
            raise self.error
        if self.calls and self.calls[-1][0] == "drain" and self.after_drain:
            self.now, *rest = self.after_drain
            self.after_drain = rest
        if model:
            kept = {n: w for n, w in self.now.workers.items() if w.offer.model == model}
            return replace(self.now, workers=kept)
        return self.now

    async def drain(self, worker_id: str, **given: Any) -> Worker:
        if worker_id not in self.now.workers:
            raise NotFound("worker", worker_id)
        self.calls.append(("drain", {"worker_id": worker_id, **given}))
        return replace(self.now.workers[worker_id], state=WorkerState.DRAINING)

    async def activate(self, worker_id: str, **given: Any) -> Worker:
        self.calls.append(("activate", {"worker_id": worker_id, **given}))
        return replace(self.now.workers[worker_id], state=WorkerState.STANDBY, told="activate")

    async def flip(self, worker_id: str, **given: Any) -> Worker:
        self.calls.append(("flip", {"worker_id": worker_id, **given}))
        return replace(self.now.workers[worker_id], state=WorkerState.DRAINING, told="flip")

    async def route(self, shape: RequestShape, **given: Any) -> Pair:
        self.calls.append(("route", (shape, given)))
        if self.error is not None:
            raise self.error
        return Pair(
            reservation_id="",
            prefill=End("p-1-aaaa", "p-1-aaaa-x", 7, "http://127.0.0.1:9", 160),
            decode=End("d-1-bbbb", "d-1-bbbb-x", 8, "http://127.0.0.1:10"),
            local=False,
            predicted_ttft_s=0.563,
            predicted_tpot_s=0.07,
            waited_s=0.0,
            ttl_s=0.0,
            explanation=EXPLANATION,
        )

    async def aclose(self) -> None:
        """Nothing is open."""


def decision(decision_id: str, *, changed: bool = True) -> dict[str, Any]:
    return {
        "decision_id": decision_id,
        "at_s": 1_790_000_000.0,
        "summary": "prefill 1 → 2, 1 ordered" if changed else "hold: targets fit the demand",
        "changes": [{"pool": "prefill", "from": 1, "to": 2}] if changed else [],
        "reasons": [
            {"code": "coupled", "text": "about decode", "pool": "decode"},
            {"code": "ttft", "text": "TTFT passes its target", "pool": "prefill"},
        ],
    }


def explanation(decision_id: str) -> dict[str, Any]:
    return {
        "decision_id": decision_id,
        "model": "demo",
        "at_s": 1_790_000_000.0,
        "summary": "prefill 1 → 2, 1 ordered",
        "policy_version": 3,
        "decision": decision(decision_id),
        "starts": [
            {
                "worker_id": "p-2-bbbb",
                "pool": "prefill",
                "status": "ready",
                "after_s": {"ordered": 0.1, "provisioned": 1.0, "ready": 6.0},
                "wall_s": 5.9,
                "segments": [
                    {
                        "name": "compile",
                        "start_s": 0.0,
                        "end_s": 2.0,
                        "modelled": True,
                        "detail": "",
                    },
                    {
                        "name": "canary",
                        "start_s": 2.0,
                        "end_s": 5.8,
                        "modelled": False,
                        "detail": "",
                    },
                ],
                "exclusive_s": {"compile": 2.0, "canary": 3.8},
                "unexplained_s": 0.1,
                "dominant_segment": "canary",
                "blocking_segment": None,
                "tier": "L2",
                "note": "",
                "log_tail": "",
            }
        ],
        "drains": [],
        "releases": [],
        "timeline": [
            {
                "after_s": 0.1,
                "who": "actuator",
                "what": "order accepted",
                "worker_id": "p-2-bbbb",
                "took_s": None,
                "note": "",
            },
            {
                "after_s": None,
                "who": "router",
                "what": "first request",
                "worker_id": "p-2-bbbb",
                "took_s": None,
                "note": "not known: none yet",
            },
        ],
        "outcome": None,
        "answer": "p-2-bbbb took 5.9 s from its order; canary took 3.8 s of it (64%)",
        "text": "…",
    }


def _side(wanted: int) -> dict[str, Any]:
    pool = {
        "before": 2,
        "wanted": wanted,
        "target": 2,
        "demand": 1000.0 * wanted,
        "demand_upper": 1100.0 * wanted,
        "horizon_s": 62.0,
        "worker_rate": 900.0,
        "load": None,
        "t_ready_p90_s": 60.0,
    }
    parts = {"capacity": 200.0, "start_drain": 60.0, "slo": 0.0}
    return {
        "prefill": pool,
        "decode": {**pool, "wanted": 2},
        "summary": "hold: targets fit the demand",
        "reasons": [{"code": "max_step", "text": "a step adds 2", "pool": "prefill"}],
        "candidates": [
            {"p": wanted, "d": 2, "cost": 260.0, "parts": parts, "feasible": True, "why_not": ""}
        ],
        "expected": [],
    }


WHAT_IF = {
    "model": "demo",
    "decision_id": "d1790000001-bbbb",
    "changes": [{"key": "isl", "text": "isl=2x", "from": 1155.0, "to": 2310.0}],
    "notes": ["measured latencies are those of the real load: only predicted ones count"],
    "as_is": _side(2),
    "what_if": _side(4),
    "differences": [{"pool": "prefill", "field": "wanted", "as_is": 2, "what_if": 4}],
    "text": "…",
}


@dataclass
class FakePlanner:
    """The part of `ports.Planner` that commands call."""

    policy: dict[str, Any] = field(
        default_factory=lambda: {"model": "demo", "slo": {"ttft_s": 2.0}, "prefill": {"max": 6}}
    )
    version: int = 3
    known: list[dict[str, Any]] = field(
        default_factory=lambda: [
            decision("d1790000002-cccc", changed=False),
            decision("d1790000001-bbbb"),
            decision("d1790000000-aaaa"),
        ]
    )
    rows: list[dict[str, Any]] = field(default_factory=list)
    error: ReadyplaneError | None = None
    differs: bool = False
    asked: list[Any] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)

    async def state(self, model: str = "") -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"workers": self.rows, "model": "demo", "policy_warnings": self.warnings}

    async def list_decisions(self, **given: Any) -> list[dict[str, Any]]:
        self.asked.append(given)
        if self.error is not None:
            raise self.error
        found = [d for d in self.known if d["changes"] or not given.get("changes_only")]
        return found[: given.get("limit", 50)]

    async def explain(self, decision_id: str) -> dict[str, Any]:
        if decision_id not in {d["decision_id"] for d in self.known}:
            raise NotFound("decision", decision_id)
        return explanation(decision_id)

    async def replay(self, decision_id: str) -> dict[str, Any]:
        if decision_id not in {d["decision_id"] for d in self.known}:
            raise NotFound("decision", decision_id)
        differs = {"field": "prefill.target", "recorded": 2, "replayed": 3}
        return {
            "decision_id": decision_id,
            "summary": "prefill 1 → 2, 1 ordered",
            "same": not self.differs,
            "differences": [differs] if self.differs else [],
            "unrecorded": ["candidates.0.cost"],
        }

    async def what_if(self, changes: Mapping[str, str], *, model: str = "") -> dict[str, Any]:
        self.asked.append((dict(changes), model))
        if self.error is not None:
            raise self.error
        return WHAT_IF

    async def get_policy(self, model: str = "") -> tuple[dict[str, Any], int]:
        return json.loads(json.dumps(self.policy)), self.version

    async def set_policy(
        self, policy: Mapping[str, Any], **given: Any
    ) -> tuple[dict[str, Any], int]:
        self.asked.append((dict(policy), given))
        if given.get("expected_version") not in {0, self.version}:
            raise Conflict(
                "policy version", given["expected_version"], self.version, "read it again"
            )
        for name in policy:
            if name not in self.policy:
                raise UnknownField(f"policy.{name}", policy[name], "did you mean policy.prefill?")
        for name, value in policy.items():
            below = self.policy.get(name)
            if isinstance(below, dict) and isinstance(value, Mapping) and given.get("merge"):
                value = {**below, **value}
            self.policy[name] = value
        self.version += 1
        return json.loads(json.dumps(self.policy)), self.version

    async def aclose(self) -> None:
        """Nothing is open."""


def stand_in(
    monkeypatch: pytest.MonkeyPatch, name: str, fake: Any, seen: list[tuple[str, str]] | None = None
) -> None:
    """Put a fake where commands make a client of `readyplane.client`; keep (address, token)."""

    def make(address: str, token: str = "", **_: Any) -> Any:
        if seen is not None:
            seen.append((address, token))
        return fake

    constructor: Callable[..., Any] = make
    monkeypatch.setattr(f"readyplane.client.{name}", constructor)
