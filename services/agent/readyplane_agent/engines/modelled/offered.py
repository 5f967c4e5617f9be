"""What a modelled engine offers beyond vLLM's answers: graphs that come later, and sleep.

Owns the routes of both and whether the engine is asleep. Asleep it answers no request; its KV is gone
and told as cleared. Waking it up reads every tensor again, and what was read must be what it had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from readyplane.core.errors import ReadyplaneError
from readyplane_agent.engines.modelled.body import BadBody, read_json
from readyplane_agent.engines.modelled.graphs import GraphStages
from readyplane_agent.engines.modelled.http import Exchange
from readyplane_agent.engines.modelled.runtime import Runtime
from readyplane_agent.engines.modelled.startup import Weights
from readyplane_agent.engines.offers import SleepDepth

LOG = logging.getLogger("engine")
WEIGHTS_MISSING = "weights_missing"


class Offered:
    """State and handlers of one engine.

    Attributes:
        graphs: None for an engine that was started whole. reread: maps and reads the arena again;
            raises like `Weights`. asleep: how deep, None while awake. failure: why it did not wake.
    """

    def __init__(self) -> None:
        self.graphs: GraphStages | None = None
        self.reread: Callable[[], Weights] | None = None
        self.asleep: SleepDepth | None = None
        self.failure = ""

    def stop(self) -> None:
        """The engine ends."""
        if self.graphs is not None:
            self.graphs.stop()

    def check_awake(self) -> None:
        """Raises BadBody (503) while it sleeps, or could not wake up."""
        if self.asleep is not None:
            why = self.failure or f"asleep: {self.asleep}"
            raise BadBody(f"the engine is not ready: {why}", status=503, kind="Asleep")

    # ------------------------------------------------------------------ graphs

    def _staged(self) -> GraphStages:
        if self.graphs is None:
            raise BadBody("this engine was started whole, not with --graph-stages", status=409)
        return self.graphs

    def show_graphs(self, exchange: Exchange) -> None:
        """GET /graphs."""
        exchange.reply_json(200, self._staged().document())

    def capture(self, exchange: Exchange) -> None:
        """POST /graphs/capture."""
        self._staged().capture()
        self.show_graphs(exchange)

    def use(self, exchange: Exchange) -> None:
        """POST /graphs/use."""
        graphs = self._staged()
        if not graphs.use():
            raise BadBody(f"nothing is captured: {graphs.state} {graphs.failure}", status=409)
        self.show_graphs(exchange)

    def drop(self, exchange: Exchange) -> None:
        """POST /graphs/drop."""
        self._staged().drop()
        self.show_graphs(exchange)

    def spoils(self, *, captured: bool) -> bool:
        """Whether an answer comes out wrong: of graphs that are used, or are asked (`captured`)."""
        graphs = self.graphs
        return graphs is not None and graphs.other_tokens and (captured or bool(graphs.used))

    # ------------------------------------------------------------------ sleep

    def sleep(self, exchange: Exchange, runtime: Runtime) -> None:
        """POST /sleep."""
        depth = read_json(exchange.body).get("depth", str(SleepDepth.WEIGHTS_IN_HOST))
        if depth not in tuple(SleepDepth):
            raise BadBody(f"depth is one of {', '.join(SleepDepth)}", "depth")
        if self.asleep is None:
            if not runtime.is_idle():
                raise BadBody("requests run, or KV is held for a reader", status=409)
            runtime.reset_prefix_cache()
            LOG.info("asleep: %s", depth)
        if self.asleep is not SleepDepth.WEIGHTS_GONE:
            self.asleep = SleepDepth(depth)
        exchange.reply_json(200, self.sleep_document())

    def wake(self, exchange: Exchange, runtime: Runtime) -> None:
        """POST /wake_up."""
        if self.asleep is not None:
            self.failure = self._read_again(runtime)
            if not self.failure:
                self.asleep = None
                LOG.info("awake")
        exchange.reply_json(503 if self.failure else 200, self.sleep_document())

    def _read_again(self, runtime: Runtime) -> str:
        """Why the weights are not what they were; empty when they are."""
        if self.reread is None:
            return WEIGHTS_MISSING
        try:
            found = self.reread()
        except (ReadyplaneError, OSError, ValueError) as error:
            return f"{WEIGHTS_MISSING}: {error}"
        if found.fingerprint != runtime.weights:
            return f"{WEIGHTS_MISSING}: other weights than before"
        return ""

    def sleep_document(self) -> dict[str, Any]:
        """GET /is_sleeping."""
        depth = None if self.asleep is None else str(self.asleep)
        return {"is_sleeping": self.asleep is not None, "depth": depth, "failure": self.failure}
