"""The router's client for whoever routes much: picks over a lean port, the rest over the usual one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from readyplane.client.channel import built
from readyplane.client.lean import LeanChannel
from readyplane.client.router import RouterClient
from readyplane.core.errors import ReadyplaneError
from readyplane.kit.telemetry import tracing_on
from readyplane.v1 import router_pb2 as pb

_ANSWERS: Mapping[str, Any] = {
    "Route": pb.RouteResponse,
    "RouteBatch": pb.RouteBatchResponse,
    "Complete": pb.CompleteResponse,
}


class PickingClient(RouterClient):
    """`readyplane.ports.Router`: Route, RouteBatch and Complete at `picks`, else as `RouterClient`.

    While traces are exported everything goes the usual way: the lean port records no spans, and a
    request is to be one trace from the gateway to the router (R24.2).
    """

    def __init__(self, address: str, token: str = "", *, picks: str, **more: Any) -> None:
        """`picks`: `host:port` of the router's `--pick-port`, several separated by commas. `more`: as
        for `RouterClient`.
        """
        super().__init__(address, token, **more)
        self._lean = LeanChannel(picks, service="router's pick port")

    async def call(
        self, name: str, build: Callable[[], Any], timeout_s: float | None = None
    ) -> Any:
        """See `ServiceClient.call`."""
        answer = _ANSWERS.get(name)
        if answer is None or tracing_on():
            return await super().call(name, build, timeout_s)
        data = await self._lean.call(
            f"/readyplane.v1.Router/{name}",
            built(name, build).SerializeToString(),
            metadata=self.metadata(),
            timeout_s=timeout_s or self.timeout_s,
        )
        try:
            return answer.FromString(data)
        except DecodeError as error:
            raise ReadyplaneError(f"an answer of {self.address} to {name}: {error}") from error

    async def aclose(self) -> None:
        """Close both ways."""
        await super().aclose()
        await self._lean.aclose()
