"""Doctor's look at the running system: each service's readiness and clock, and the planner's view."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from email.utils import parsedate_to_datetime
from typing import Any

from readyplane.core.errors import ReadyplaneError, Unavailable
from readyplane_lab.cli.finding import Finding
from readyplane_lab.cli.held_back import shortfalls
from readyplane_lab.cli.where import Where, find, planner_of, within

AREA = "system"
ANSWER_S_MAX = 5.0
SKEW_S_MAX = 2.0
STATE_AGE_S_MAX = 15.0
WHY_CHARS_MAX = 600
ADVISED = "this planner only advises: start the workers by hand"
SERVICES = ("registry", "router", "planner", "gateway")


async def findings(given: dict[str, str]) -> AsyncIterator[Finding]:
    """Findings about what runs; one that says so when nothing does."""
    from readyplane_lab.up.address_book import book_path, read_book

    if any(given.values()):
        where = find(*(name for name, value in given.items() if value), **given)
        for name, address in given.items():
            if address and name.endswith("_http"):
                yield await _http(name.removesuffix("_http"), where.registry_http)
            elif address:
                yield await _grpc(name, address)
    else:
        book = read_book()
        if book is None:
            stale = book_path().exists()
            found = "none of this user" + (f" ({book_path()} is of a killed one)" if stale else "")
            yield Finding(AREA, "running `up`", "ok", found)
            return
        yield Finding(AREA, "running `up`", "ok", f"process {book.pid}, data in {book.data_dir}")
        where = find("planner")
        for name in SERVICES:
            yield await _http(name, getattr(book, f"{name}_http"))
            if name != "gateway":
                yield await _grpc(name, getattr(book, name))
        yield await _grpc("actuator", book.actuator, where.token)
    if where.planner:
        async for finding in _planner(where):
            yield finding


async def _http(name: str, url: str) -> Finding:
    """Readiness as the service tells it, and its clock by the Date of its answer."""
    import aiohttp

    from readyplane.kit.clock import SystemClock

    label = f"{name} (HTTP)"
    path = "/health" if name == "gateway" else "/readyz"
    limits = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits) as session,
            session.get(url + path) as answer,
        ):
            text = await answer.text()
            skew_s = _skew_s(answer.headers.get("date", ""), SystemClock().wall_s())
            status = answer.status
    except (aiohttp.ClientError, TimeoutError) as error:
        said = f"{url} does not answer ({str(error) or type(error).__name__})"
        return Finding(AREA, label, "fail", said, f"see the end of {name}.log in the logs folder")
    if status != 200:
        remedy = f"see {name}.log in the logs folder"
        return Finding(AREA, label, "fail", f"{url} is not ready: {_why(text)}", remedy)
    if skew_s is not None and abs(skew_s) > SKEW_S_MAX:
        found = f"{url} is ready, its clock is {skew_s:+.0f} s off"
        return Finding(AREA, label, "warn", found, "set the clocks by NTP")
    return Finding(AREA, label, "ok", f"{url} is ready")


def _skew_s(date: str, now_s: float) -> float | None:
    """Seconds that a Date header is ahead; it has whole seconds, so up to 1 s is nothing."""
    try:
        found_s = parsedate_to_datetime(date).timestamp()
    except (ValueError, TypeError):
        return None
    return found_s + 0.5 - now_s


def _why(text: str) -> str:
    try:
        document: Any = json.loads(text)
    except ValueError:
        return _cut(text)
    found = document.get("why") if isinstance(document, dict) else None
    return _cut(str(found or text))


def _cut(text: str) -> str:
    """Whole as long as a reason with its remedy is; what is longer says that it goes on."""
    return text if len(text) <= WHY_CHARS_MAX else text[: WHY_CHARS_MAX - 1] + "…"


async def _grpc(name: str, address: str, token: str = "") -> Finding:
    """The standard health service; one that has none (the actuator) is asked for its list."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    label = f"{name} (gRPC)"
    try:
        if name == "actuator":
            found = await _instances(address, token)
            return Finding(AREA, label, "ok", f"{address} answers, {found} workers allocated")
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S_MAX)
    except grpc.RpcError as error:
        said = getattr(error, "details", lambda: "")() or str(error)
        return Finding(
            AREA, label, "fail", f"{address}: {said}", "check that it runs and listens there"
        )
    except ReadyplaneError as error:
        return Finding(AREA, label, "fail", f"{address}: {error}", "stop `up` and start it again")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        remedy = f"wait a moment; then see {name}'s log"
        return Finding(AREA, label, "fail", f"{address} is not serving", remedy)
    return Finding(AREA, label, "ok", f"{address} is serving")


async def _instances(address: str, token: str) -> int:
    from readyplane.client import ActuatorClient

    client = ActuatorClient(address, token)
    try:
        return sum(i.state in {"pending", "running"} for i in await client.list_instances())
    finally:
        await client.aclose()


async def _planner(where: Where) -> AsyncIterator[Finding]:
    from readyplane.kit.clock import SystemClock

    try:
        async with planner_of(where) as planner:
            state = await within(planner.state(), ANSWER_S_MAX, "the planner")
    except ReadyplaneError as error:
        remedy = "wait for its first tick" if isinstance(error, Unavailable) else "see its log"
        yield Finding(AREA, "planner's view", "fail", str(error), remedy)
        return
    age_s = SystemClock().wall_s() - float(state["now_s"])
    degraded = state.get("degraded")
    if abs(age_s) > STATE_AGE_S_MAX:
        remedy = "see planner.log: it does not tick, or its clock is off"
        yield Finding(AREA, "planner's view", "fail", f"{age_s:.0f} s old", remedy)
    elif degraded:
        yield Finding(AREA, "planner's view", "warn", f"degraded: {degraded}", "see what it names")
    else:
        yield Finding(AREA, "planner's view", "ok", f"model {state['model']}, {_pools(state)}")
    if state.get("paused"):
        remedy = "let go with `readyplane policy set paused=false`"
        yield Finding(AREA, "planner", "warn", "paused: targets are held", remedy)
    for finding in (*_short(state), *_dead_ends(state), *_denied(state), *_workers(state)):
        yield finding


def _workers(state: dict[str, Any]) -> list[Finding]:
    """Workers that are of no use as they are."""
    found = []
    for worker in state.get("workers", ()):
        name = f"worker {worker['worker_id']}"
        failure = (worker.get("start") or {}).get("failure")
        unheard_s = worker.get("unheard_s")
        if unheard_s is not None:
            said = (
                f"it was {worker['state']} when nothing was heard of it any more, {unheard_s:.0f} s ago; "
                "its process runs"
            )
            remedy = (
                f"see worker-{worker['worker_id']}.log in the logs folder: its agent hangs, is "
                "stopped or cannot reach the router; the planner gives it back after policy.orphan_s"
            )
            found.append(Finding(AREA, name, "warn", said, remedy))
        elif worker["state"] == "stalled" or failure:
            said = failure or (
                "its engine does not answer, or has work and makes no progress; nothing is sent to it"
            )
            remedy = f"drain it: `readyplane drain {worker['worker_id']}`"
            found.append(Finding(AREA, name, "warn", said, remedy))
        elif worker.get("unpairable"):
            remedy = "start or attach a worker of the other stage with this KV format, or drain it"
            found.append(Finding(AREA, name, "warn", worker["unpairable"], remedy))
    return found


def _short(state: dict[str, Any]) -> list[Finding]:
    """Pools that are short of ready workers with nothing coming, or whose orders are held back."""
    return [
        Finding(
            AREA,
            f"{found.pool} workers",
            "fail" if found.refuses and not state.get("advisory") else "warn",
            found.text() + ("; every request is refused" * found.refuses),
            ADVISED if state.get("advisory") else found.remedy,
        )
        for found in shortfalls(state)
    ]


def _dead_ends(state: dict[str, Any]) -> list[Finding]:
    """Artifacts of which nothing, or no standby, is ordered any more (B132)."""
    remedy = "publish it again, sign it or name another one; then `readyplane policy again`"
    wait = "`readyplane policy set {0}.standby_holds=weights`, or {0}.standby=0"
    return [
        Finding(
            AREA,
            f"starts of {name} {'standbys' if found.get('standby') else 'workers'}",
            "warn" if found.get("standby") else "fail",
            f"none is ordered any more: {found['starts']} starts of {found['digest']} ended for "
            f"good ({found['kind']}: {found['why']})",
            wait.format(name) if found.get("standby") else remedy,
        )
        for name, pool in state["pools"].items()
        for found in pool.get("dead_ends", ())
    ]


def _denied(state: dict[str, Any]) -> list[Finding]:
    """Classes of which the actuator takes no order; a failure where workers are missing for it."""
    found = []
    for name, pool in state["pools"].items():
        short = pool["provisioned"] < pool["desired"] and not state.get("advisory")
        for denied in pool.get("denied", ()):
            missing = f"; {pool['provisioned']} of {pool['desired']} workers are there" * short
            again = f"it is asked for again in {denied['again_in_s']:.0f} s by itself"
            remedy = f"do what the refusal says; {again}"
            if state.get("advisory"):
                remedy = ADVISED
            found.append(
                Finding(
                    AREA,
                    f"orders of {name} workers",
                    "fail" if short else "warn",
                    f"{denied['worker_class']} was refused {denied['times']} times, last "
                    f"{denied['ago_s']:.0f} s ago: {denied['why']}{missing}",
                    remedy,
                )
            )
    return found


def _pools(state: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {pool['ready']} ready of {pool['desired']} desired"
        for name, pool in state["pools"].items()
    )
