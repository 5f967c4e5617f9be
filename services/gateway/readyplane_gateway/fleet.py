"""The gateway's view of the fleet: which models are known, which can be served, how long a prompt.

Owns nothing but the last snapshot that the router sent and what follows from it. Which pair serves
a request is the router's decision; this answers `/v1/models`, 404 against 503, and length limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from readyplane.core.errors import NotFound, ReadyplaneError, Refused, Unavailable
from readyplane.core.identity import KvFormat, compatible
from readyplane.core.worker import Fleet, Role, Worker, WorkerState

SEEN_MODELS_MAX = 1024
_CAN_TOKENISE = (WorkerState.READY, WorkerState.DRAINING)


class RouterRefuses(ReadyplaneError):
    """Whoever is asked serves no gateway, or not this one: asking again does not help."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the router refuses the gateway ({why}): start it with the router's usual gRPC address "
            "(--router; the pick port is --router-picks) and its token"
        )


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """One model as the fleet stands.

    Attributes:
        ready: a prefill and a decode worker are ready that fit each other.
        max_model_len: largest prompt plus output that a ready worker takes; None when not known.
        tokenisers: workers that can turn text into tokens, least busy first.
        tokenizer: digest of their tokenizer. failures: why workers failed to start.
        starting: workers on their way.
    """

    name: str
    ready: bool = False
    max_model_len: int | None = None
    tokenisers: tuple[Worker, ...] = ()
    tokenizer: str = ""
    failures: tuple[str, ...] = ()
    starting: int = 0

    def tokeniser_urls(self, text_bytes: int) -> list[str]:
        """Engines to ask for tokens: an engine refuses text beyond its own limit, so those that may
        (their caches differ) come last; among the others the least busy first.
        """
        serving = [w.serving for w in self.tokenisers if w.serving is not None]
        by_room = sorted(serving, key=lambda s: -min(s.max_model_len, text_bytes))
        return [s.engine_url for s in by_room]


class FleetView:
    """The last snapshot and what is known beside it.

    Attributes:
        applied: a snapshot has come. refused: why none will ever come, empty while one may.
    """

    def __init__(
        self, gone: Callable[[str, str], None], drains: Callable[[Worker], None] = lambda _: None
    ) -> None:
        """`gone(worker_id, incarnation)` is called for each worker that is known to have ended,
        `drains` once for each that is to leave.
        """
        self.fleet = Fleet()
        self.applied = False
        self.refused = ""
        self._gone, self._drains = gone, drains
        self._models: dict[str, ModelFacts] = {}
        self._seen: dict[str, None] = {}
        self._published: frozenset[str] = frozenset()

    def apply(self, fleet: Fleet) -> None:
        """Take a snapshot. A worker that is merely missing is not taken for dead: the router may
        have restarted; one that is gone, or was succeeded by another incarnation, is.
        """
        for key, worker in self.fleet.workers.items():
            now = fleet.workers.get(key)
            succeeded = now is not None and now.offer.incarnation != worker.offer.incarnation
            if succeeded or (now is not None and now.state is WorkerState.GONE):
                self._gone(worker.worker_id, worker.offer.incarnation)
        for key, worker in fleet.workers.items():
            if worker.state is WorkerState.DRAINING:
                before = self.fleet.workers.get(key)
                if before is None or before.state is not WorkerState.DRAINING:
                    self._drains(worker)
        self.fleet = fleet
        self.applied, self.refused = True, ""
        names = {worker.offer.model for worker in fleet.workers.values()}
        self._models = {name: _facts(fleet, name) for name in sorted(names)}
        for name in names:
            self._seen.pop(name, None)
            self._seen[name] = None
        while len(self._seen) > SEEN_MODELS_MAX:
            del self._seen[next(iter(self._seen))]

    def publish(self, models: Iterable[str]) -> None:
        """Models that the registry holds, whether or not a worker serves them."""
        self._published = frozenset(models)

    def find(self, model: str) -> ModelFacts:
        """What is known of a model.

        A model whose workers have all gone, or that a restarted router has not heard of again, is
        known and not ready.

        Raises:
            Unavailable: no snapshot has come yet (B51). RouterRefuses: none ever will.
            NotFound: neither the fleet nor the registry knows it (B172).
            Refused: every worker that was started for it failed, with the reasons (B172).
        """
        facts = self._models.get(model)
        if facts is None:
            if self.knows(model):
                return ModelFacts(model)
            if not self.applied:
                if self.refused:
                    raise RouterRefuses(self.refused)
                raise Unavailable("the router has not sent the fleet yet", "try again")
            raise NotFound("model", model[:200], "choose one of /v1/models")
        if facts.failures and not facts.starting and not facts.tokenisers:
            raise Refused(f"model {model}", facts.failures, "see the workers' start-up log")
        return facts

    def limit_tokens(self, model: str) -> int | None:
        """Largest prompt plus output of a model; None when not known."""
        facts = self._models.get(model)
        return None if facts is None else facts.max_model_len

    def knows(self, model: str) -> bool:
        """Whether it may be a metric's label."""
        return model in self._models or model in self._seen or model in self._published

    def ready_models(self) -> list[ModelFacts]:
        """Models that can be served now."""
        return [facts for facts in self._models.values() if facts.ready]

    def engine_urls(self) -> set[str]:
        """Engines that may be spoken to."""
        return {w.serving.engine_url for w in self.fleet.workers.values() if w.serving}


def _facts(fleet: Fleet, model: str) -> ModelFacts:
    mine = [w for w in fleet.workers.values() if w.offer.model == model]
    speaking = [w for w in mine if w.serving is not None and w.state in _CAN_TOKENISE]
    ready = [w for w in speaking if w.state is WorkerState.READY]
    limits = [w.serving.max_model_len for w in ready or speaking if w.serving is not None]
    digests = {w.serving.tokenizer_digest for w in speaking if w.serving is not None}
    return ModelFacts(
        name=model,
        ready=_has_pair(ready),
        max_model_len=max(limits, default=None),
        # Decode workers last: tokenising there would hold up somebody's next token.
        tokenisers=tuple(sorted(speaking, key=lambda w: (w.role is Role.DECODE, w.active))),
        tokenizer=",".join(sorted(digests)),
        failures=tuple(
            f"{w.worker_id}: {w.progress.failure}"
            for w in mine
            if w.progress is not None and w.progress.failure
        ),
        starting=sum(
            w.state in (WorkerState.ORDERED, WorkerState.PROVISIONED)
            and not (w.progress is not None and w.progress.failure)
            for w in mine
        ),
    )


def _has_pair(ready: Iterable[Worker]) -> bool:
    prefill: set[KvFormat] = set()
    decode: set[KvFormat] = set()
    for worker in ready:
        assert worker.serving is not None
        if worker.role is Role.BOTH:
            return True
        (prefill if worker.role is Role.PREFILL else decode).add(worker.serving.kv)
    return any(not compatible(p, d) for p in prefill for d in decode)
