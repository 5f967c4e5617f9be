"""Moves over gRPC: the same reservation, counts and refusals as in the router's own process."""

import pytest

from readyplane.core.errors import NotFound, Overloaded
from readyplane.core.work import EventKind, RequestEvent
from readyplane.core.worker import Role
from readyplane.ports import Mover
from tests.contract.test_router_requests import serving
from tests.router_world import FakeWorker, offer, shape


@pytest.mark.parametrize("role", [Role.DECODE, Role.BOTH])
@pytest.mark.parametrize("isl", [3, 100])
async def test_a_move_over_grpc_is_the_router_s_own(role: Role, isl: int) -> None:
    """To whoever decodes, also a convertible worker, and with less KV than a block."""
    async with serving("alone") as case:
        mover: Mover = case.client
        pair = await case.client.route(shape("r", isl=isl))
        told = [EventKind.PREFILL_DONE, EventKind.FIRST_TOKEN]
        await case.client.complete([RequestEvent(pair.reservation_id, kind) for kind in told])
        with pytest.raises(Overloaded, match="no other decode worker"):
            await mover.move(
                shape("r", isl=isl), reservation_id=pair.reservation_id, worker_id="d0", emitted=9
            )
        await FakeWorker(case.service, offer("d1", role)).start()
        moved = await mover.move(
            shape("r", isl=isl), reservation_id=pair.reservation_id, worker_id="d0", emitted=9
        )
        assert (moved.decode.worker_id, moved.local) == ("d1", True)
        assert await case.used() == 1
        ended = RequestEvent(moved.reservation_id, EventKind.FINISHED, output_tokens=20)
        assert await case.client.complete([ended]) == 0
        assert await case.used() == 0
        with pytest.raises(NotFound, match="nowhere"):
            await mover.move(shape("x"), reservation_id="x.0", worker_id="nowhere", emitted=1)
