"""The modelled engine at work: requests in, tokens out when the model says so.

Owns the living requests and the one timer that drives the model in real time. HTTP is `server`'s,
hand-overs and KV events go through their own channels; here they meet.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from readyplane.core.errors import InvalidField
from readyplane.core.profile import LinkClass
from readyplane.core.work import pack_tokens, sequence_hashes
from readyplane.kit.clock import Clock
from readyplane_agent.engines.modelled import answer
from readyplane_agent.engines.modelled.answer_state import Choices, Draws
from readyplane_agent.engines.modelled.body import Ask, BadBody
from readyplane_agent.engines.modelled.core import EngineModel
from readyplane_agent.engines.modelled.core_events import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    Finished,
    KvExpired,
    KvWanted,
    PrefillDone,
    RequestMode,
    TokensEmitted,
)
from readyplane_agent.engines.modelled.handover import (
    HandoverChannel,
    HeldKv,
    PulledKv,
    RemoteKv,
    read_params,
)
from readyplane_agent.engines.modelled.kv_publish import KvPublisher
from readyplane_agent.engines.modelled.metrics import EngineMetrics

LOG = logging.getLogger("engine")
OUTPUT_HASHED_TOKENS_MAX = 8192
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of an answer and their text; `reason` on the last one, `failure` instead of it."""

    tokens: Sequence[int]
    text: str
    reason: str = ""
    stop_reason: str | int | None = None
    failure: str = ""


class Job:
    """A request from HTTP to its last token."""

    __slots__ = (
        "arrived_s",
        "ask",
        "base",
        "cached",
        "context",
        "cut",
        "deliver",
        "delivered",
        "emitted",
        "failure",
        "first_s",
        "hashes",
        "id",
        "kv_params",
        "last_s",
        "mode",
        "output",
        "packed",
        "remote",
        "stop_reason",
        "tokens",
    )

    def __init__(self, job_id: str, ask: Ask, deliver: Callable[[Job, Piece], None]) -> None:
        self.id, self.ask, self.deliver = job_id, ask, deliver
        begun = ask.continues.output if ask.continues is not None else ()
        self.base = len(begun)  # output tokens that another engine has given
        self.context = len(ask.prompt) + self.base
        self.packed = pack_tokens(ask.prompt + begun)
        self.mode = RequestMode.LOCAL
        self.remote: RemoteKv | None = None
        self.output = 0
        self.tokens: list[int] = []
        self.cut: int | None = None
        self.stop_reason: str | int | None = None
        self.hashes: tuple[int, ...] = ()
        self.emitted = 0
        self.delivered = self.base
        self.cached = 0
        self.failure = ""
        self.arrived_s = 0.0
        self.first_s: float | None = None
        self.last_s = 0.0
        self.kv_params: dict[str, Any] | None = None


class Runtime:
    """One engine in real time."""

    def __init__(
        self,
        model: EngineModel,
        clock: Clock,
        *,
        metrics: EngineMetrics,
        weights: int,
        max_model_len: int,
        max_waiting: int,
        link: LinkClass,
        engine_id: str,
        host: str,
        make_id: Callable[[], str],
    ) -> None:
        self.model, self.metrics = model, metrics
        self._clock, self.weights = clock, weights
        self._max_model_len, self._max_waiting = max_model_len, max_waiting
        self._link, self._engine_id, self._host = link, engine_id, host
        self._make_id = make_id
        self._jobs: dict[str, Job] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pulling = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._block_ids = deque(range(model.pool.total))
        self.channel: HandoverChannel | None = None
        self.publisher: KvPublisher | None = None

    # ------------------------------------------------------------------ requests

    def submit(self, ask: Ask, deliver: Callable[[Job, Piece], None]) -> Job:
        """Take a request in; its pieces go to `deliver`.

        Raises:
            BadBody: it cannot be served, or the queue is full (503).
        """
        if self.model.stats().waiting >= self._max_waiting:
            raise BadBody(
                f"the queue holds {self._max_waiting} requests; try again later",
                status=503,
                kind="ServiceUnavailableError",
            )
        job = Job(self._make_id(), ask, deliver)
        if ask.kv is not None:
            job.remote = read_params(ask.kv)
            job.mode = RequestMode.REMOTE_PREFILL if job.remote else RequestMode.REMOTE_DECODE
            if self.channel is None:
                raise BadBody("this engine has no KV connector", "kv_transfer_params")
        reason = self._decide_length(job)
        now_s = self._clock.monotonic_s()
        job.arrived_s = job.last_s = now_s
        if job.base:
            job.first_s = now_s  # the client has long seen its first token
        request = self._request(job, reason)
        try:
            self.model.submit(request, now_s)
        except InvalidField as error:
            raise BadBody(str(error), "messages" if ask.chat else "prompt") from error
        self._jobs[job.id] = job
        self._pump()
        return job

    def abort(self, job: Job) -> None:
        """The client is gone: stop at once and free its blocks."""
        if self._jobs.get(job.id) is job:
            self.model.abort(job.id, self._clock.monotonic_s())
            if job.remote is not None and not job.emitted and self.channel is not None:
                self.channel.done(job.remote)  # nobody will read that KV any more
            self._pump()

    def abort_requests(self, ids: Sequence[str]) -> list[str]:
        """Abort by id: what runs ends with reason `abort`, KV held for a reader is freed.

        An id is the engine's own (`remote_request_id`, with or without the prefix of an answer's
        id) or the client's (`x-request-id`). Returns the ids that were known.
        """
        self._pump()
        known: list[str] = []
        for given in ids:
            names = {given, given.removeprefix("cmpl-"), given.removeprefix("chatcmpl-")}
            running = [
                job
                for job in self._jobs.values()
                if not names.isdisjoint((job.id, job.ask.request_id))
            ]
            for job in running:
                self.abort(job)
                job.deliver(job, Piece((), "", "abort"))
            held = self.channel.held if self.channel is not None else {}
            left = [i for i, kv in held.items() if not names.isdisjoint((i, kv.name))]
            for request_id in left:
                self.metrics.abandoned += 1
                self.model.abort(request_id, self._clock.monotonic_s())
                self._forget(request_id)
            if running or left:
                known.append(given)
        self._pump()
        return known

    def move_out(self, name: str) -> dict[str, Any] | None:
        """Stop a request that decodes, so that another engine may go on with it: its stream ends
        with reason `moved`, and its KV is held for that engine.

        Args:
            name: the engine's id of it or the client's (`x-request-id`).

        Returns:
            What the other engine needs: `continuation`, and `kv_transfer_params`. None when no such
            request decodes here.
        """
        self._pump()
        names = {name, name.removeprefix("cmpl-"), name.removeprefix("chatcmpl-")}
        job = next(
            (j for j in self._jobs.values() if not names.isdisjoint((j.id, j.ask.request_id))), None
        )
        if job is None or self.channel is None:
            return None
        emitted = self.model.move_out(job.id, self._clock.monotonic_s())
        if emitted is None:
            self._pump()
            return None
        self._pump()
        given = job.base + emitted
        prefix = "chatcmpl-" if job.ask.chat else "cmpl-"
        begun = job.ask.continues
        draws, choices = draws_of(job.ask), choices_of(job.ask)
        if choices is not None:
            for token in job.tokens[job.base : given]:
                choices.step(token)
        return {
            "continuation": {
                "output_token_ids": job.tokens[:given],
                "response_id": (begun and begun.response_id) or prefix + job.id,
                "draws": None if draws is None else str(draws.after(emitted).state),
                "choices": None if choices is None else choices.document(),
            },
            "kv_transfer_params": job.kv_params,
        }

    def stop(self) -> None:
        """Abort everything."""
        for job in list(self._jobs.values()):
            self.abort(job)
        for task in list(self._tasks):
            task.cancel()
        if self._timer is not None:
            self._timer.cancel()

    def is_idle(self) -> bool:
        """No request and no KV held."""
        self._pump()
        return self.model.is_idle()

    def stats(self) -> EngineStats:
        """Gauges and counters now."""
        self._pump()
        return self.model.stats()

    def reset_prefix_cache(self) -> bool:
        """Forget idle blocks; True when no block is cached any more."""
        empty = self.model.reset_prefix_cache(self._clock.monotonic_s())
        self._pump()
        return empty

    def _decide_length(self, job: Job) -> str:
        """Work out the whole answer and where it ends; returns the finish reason."""
        ask = job.ask
        room = self._max_model_len - len(ask.prompt)
        limit = min(room, ask.max_tokens if ask.max_tokens is not None else room)
        natural = ask.modelled_output_tokens or answer.answer_length(pack_tokens(ask.prompt))
        wanted = limit if ask.ignore_eos else max(natural, ask.min_tokens)
        job.output = min(wanted, limit)
        reason = "stop" if wanted <= limit and not ask.ignore_eos else "length"
        if job.mode is RequestMode.REMOTE_DECODE:
            job.output, reason = 1, "length"
        job.tokens = self._answer(job, job.packed)
        if ask.choices:
            if len(job.tokens) < job.output:
                reason = "stop"
            job.output = max(1, len(job.tokens))
        if (ask.stop or ask.stop_token_ids) and job.mode is not RequestMode.REMOTE_DECODE:
            reason = _cut_at_stop(job) or reason
        return reason

    def _answer(self, job: Job, context: bytes, *, kv: int | None = None) -> list[int]:
        """All tokens of the answer: those begun elsewhere, and what goes on from them."""
        begun = job.ask.continues.output if job.ask.continues is not None else ()
        goes_on = answer.Answer(
            self.weights, context, kv=kv, draws=draws_of(job.ask), choices=choices_of(job.ask)
        )
        return [*begun, *goes_on.take(max(0, job.output - len(begun)))]

    def _request(self, job: Job, reason: str) -> EngineRequest:
        size = self.model.block_size
        salt = job.ask.cache_salt
        whole = job.packed
        if job.mode is RequestMode.LOCAL and job.output <= OUTPUT_HASHED_TOKENS_MAX:
            whole += pack_tokens(job.tokens)
        job.hashes = sequence_hashes(whole, size, cache_salt=salt)
        full = job.context // size
        return EngineRequest(
            request_id=job.id,
            prompt_tokens=job.context,
            output_tokens=max(1, job.output - job.base),
            block_hashes=job.hashes[:full],
            mode=job.mode,
            output_hashes=job.hashes[full:],
            finish_reason=reason,
        )

    # ------------------------------------------------------------------ time

    def _pump(self) -> None:
        """Let the model run up to now, tell what happened, and set the timer for the next."""
        now_s = self._clock.monotonic_s()
        events = self.model.advance(now_s)
        if events:
            if self.publisher is not None:
                self.publisher.publish(events, self._block_content, self._clock.wall_s())
            for event in events:
                self._handle(event)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self.model.next_event_s()
        if next_s is not None:
            delay_s = max(0.0, next_s - self._clock.monotonic_s())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._pump)

    def _handle(self, event: EngineEvent) -> None:
        if isinstance(event, TokensEmitted):
            self._on_tokens(event)
        elif isinstance(event, PrefillDone):
            if (job := self._jobs.get(event.request_id)) is not None:
                job.cached = event.cached_tokens
        elif isinstance(event, Finished):
            self._on_finished(event)
        elif isinstance(event, KvWanted):
            job = self._jobs.get(event.request_id)
            if job is not None and job.remote is not None:
                job.cached = event.cached_tokens
                self._spawn(self._load(job, job.remote, event.tokens))
        elif isinstance(event, KvExpired):
            self._forget(event.request_id)

    def _on_tokens(self, event: TokensEmitted) -> None:
        job = self._jobs.get(event.request_id)
        if job is None:
            return
        now_s = self._clock.monotonic_s()
        metrics = self.metrics
        metrics.late(now_s - event.at_s)
        if job.first_s is None:
            job.first_s = now_s
            metrics.observe("time_to_first_token_seconds", now_s - job.arrived_s)
            later = event.count - 1
        else:
            later = event.count
        if later:
            since = now_s - (job.last_s if job.emitted else job.first_s)
            metrics.observe("inter_token_latency_seconds", since / later, later)
        job.last_s = now_s
        job.emitted += event.count
        given = job.base + job.emitted
        if given < job.output:  # the last tokens go out with the finish reason
            self._deliver(job, given)

    def _on_finished(self, event: Finished) -> None:
        job = self._jobs.pop(event.request_id, None)
        if job is None:
            return
        self._measure(job, event)
        if event.held:
            self._hold(job)
        if event.reason == "error":
            job.deliver(job, Piece((), "", failure=f"KV load failed: {job.failure}"))
        elif event.reason == "moved":
            job.deliver(job, Piece((), "", event.reason))
        elif event.reason != "abort":
            self._deliver(job, job.output, event.reason)

    @staticmethod
    def _deliver(job: Job, upto: int, reason: str = "") -> None:
        start, job.delivered = job.delivered, upto
        tokens = job.tokens[start:upto]
        visible = tokens if job.cut is None else job.tokens[start : min(upto, job.cut)]
        stop_reason = job.stop_reason if reason else None
        job.deliver(job, Piece(tokens, answer.decode(visible), reason, stop_reason))

    def _measure(self, job: Job, event: Finished) -> None:
        now_s, metrics = self._clock.monotonic_s(), self.metrics
        metrics.finished(event.reason)
        decode_s = now_s - job.first_s if job.first_s is not None else 0.0
        metrics.observe("e2e_request_latency_seconds", now_s - job.arrived_s)
        metrics.observe("request_queue_time_seconds", event.queue_s)
        metrics.observe("request_prefill_time_seconds", event.prefill_s)
        metrics.observe("request_decode_time_seconds", decode_s)
        metrics.observe("request_inference_time_seconds", event.prefill_s + decode_s)
        metrics.observe("request_prompt_tokens", len(job.ask.prompt))
        metrics.observe("request_generation_tokens", event.output_tokens)
        if event.output_tokens > 1:
            mean_s = decode_s / (event.output_tokens - 1)
            metrics.observe("request_time_per_output_token_seconds", mean_s)

    def _block_content(
        self, request_id: str, first: int, count: int
    ) -> tuple[Sequence[int], int | None, str]:
        """Token ids of blocks `first … first + count`, and the hash of the block before them."""
        job, size = self._jobs[request_id], self.model.block_size
        prompt = job.ask.prompt
        start, end = first * size, (first + count) * size
        tokens = list(prompt[start:end])
        if end > len(prompt):
            tokens += job.tokens[max(0, start - len(prompt)) : end - len(prompt)]
        return tokens, job.hashes[first - 1] if first else None, job.ask.cache_salt

    # ------------------------------------------------------------------ hand-over: the giver

    def _hold(self, job: Job) -> None:
        channel = self.channel
        assert channel is not None
        packed = job.packed
        if job.mode is not RequestMode.REMOTE_DECODE:  # it decoded, and goes on elsewhere
            packed = pack_tokens((*job.ask.prompt, *job.tokens[: job.base + job.emitted]))
        count = -(-(len(packed) // 4) // self.model.block_size)
        ids = tuple(self._block_ids.popleft() for _ in range(count))
        digest = answer.kv_digest(self.weights, packed)
        channel.held[job.id] = HeldKv(packed, digest, ids, job.ask.request_id)
        job.kv_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(ids)],
            "remote_engine_id": self._engine_id,
            "remote_request_id": job.id,
            "remote_host": self._host,
            "remote_port": channel.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": len(packed) // 4,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def on_pulled(self, request_id: str) -> None:
        """A reader has its KV."""
        self.model.kv_pulled(request_id, self._clock.monotonic_s())
        self._forget(request_id)
        self._pump()

    def on_extend(self, request_id: str) -> None:
        """A reader will come."""
        self.model.kv_extend(request_id, self._clock.monotonic_s())

    def _forget(self, request_id: str) -> None:
        if self.channel is not None:
            held = self.channel.held.pop(request_id, None)
            if held is not None:
                self._block_ids.extend(held.block_ids)

    # ------------------------------------------------------------------ hand-over: the reader

    async def keep_remote_alive(self, every_s: float) -> None:
        """While decode legs wait for blocks here, their givers hear of it."""
        while True:
            await self._clock.sleep(every_s)
            for job in list(self._jobs.values()):
                if job.remote is not None and not job.emitted and self.channel is not None:
                    self.channel.extend(job.remote)

    async def _load(self, job: Job, remote: RemoteKv, tokens: int) -> None:
        """Bring the KV of a decode leg: check it, wait as long as its bytes take, use it."""
        channel = self.channel
        assert channel is not None
        begun_s = self._clock.monotonic_s()
        self._pulling += 1
        size_bytes = tokens * self.model.profile.kv_bytes_per_token
        try:
            pulled = await channel.pull(remote)
            job.failure = pulled.failure or self._wrong(job, remote, pulled)
            if not job.failure:
                wire_s = self._link.transfer_s(size_bytes, sharers=self._pulling)
                spent_s = self._clock.monotonic_s() - begun_s
                await self._clock.sleep(max(0.0, wire_s - spent_s))
        finally:
            self._pulling -= 1
        if self._jobs.get(job.id) is not job:
            return  # aborted meanwhile; the giver has been told
        now_s = self._clock.monotonic_s()
        if job.failure:
            self.metrics.failed_transfers += 1
            LOG.warning("KV load of %s failed: %s", job.id, job.failure)
            self.model.kv_failed(job.id, now_s)
        else:
            self._decode_from(job, pulled)
            if not channel.done(remote):
                self.metrics.failed_notifications += 1
            self._count_transfer(now_s - begun_s, size_bytes, tokens)
            self.model.kv_arrived(job.id, now_s)
        self._pump()

    @staticmethod
    def _wrong(job: Job, remote: RemoteKv, pulled: PulledKv) -> str:
        """Why a KV cannot be this request's, as far as lengths tell; empty if it can."""
        count, wanted = len(pulled.prompt) // 4, job.context
        if count != wanted or (remote.num_tokens or wanted) != wanted:
            return f"the KV has {count} tokens, the prompt {wanted}"
        return ""

    def _decode_from(self, job: Job, pulled: PulledKv) -> None:
        """The answer follows from the KV as it is, not from what it should be."""
        if pulled.prompt == job.packed and pulled.kv == answer.kv_digest(self.weights, job.packed):
            return
        job.cut = None
        job.tokens = self._answer(job, pulled.prompt, kv=pulled.kv)
        LOG.warning("KV of %s is not what these weights and this prompt make", job.id)

    def _count_transfer(self, seconds: float, size_bytes: int, tokens: int) -> None:
        self.metrics.observe("nixl_xfer_time_seconds", seconds)
        self.metrics.observe("nixl_post_time_seconds", self._link.setup_s)
        self.metrics.observe("nixl_bytes_transferred", size_bytes)
        self.metrics.observe("nixl_num_descriptors", -(-tokens // self.model.block_size))
        self.metrics.external_queries += tokens
        self.metrics.external_hits += tokens

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def draws_of(ask: Ask) -> Draws | None:
    """Where the draws of an answer are: at its seed, or where another engine left them."""
    if ask.continues is not None and ask.continues.draws is not None:
        return Draws(ask.continues.draws)
    return None if ask.seed is None or ask.continues is not None else Draws(ask.seed & _MASK)


def choices_of(ask: Ask) -> Choices | None:
    """Which of its texts an answer may still become.

    Raises:
        BadBody: what another engine left is no state of these.
    """
    if not ask.choices:
        return None
    choices = Choices.of(ask.choices)
    if ask.continues is None or ask.continues.choices is None:
        return choices
    try:
        return choices.resumed(ask.continues.choices)
    except ValueError as error:
        raise BadBody(str(error), "continuation.choices") from error


def _cut_at_stop(job: Job) -> str:
    """Shorten the answer at the first stop text or token; returns `stop` when there is one.

    Every answer token is one letter, so that positions in the text are positions in the answer.
    """
    ask, text = job.ask, answer.decode(job.tokens)
    best: tuple[int, int, str | int] | None = None  # tokens, visible tokens, what stopped it
    for stop in ask.stop:
        at = text.find(stop, max(0, ask.min_tokens - len(stop)))
        if at >= 0:
            end = at + len(stop)
            found = (end, end if ask.include_stop else at, stop)
            best = found if best is None or found[0] < best[0] else best
    for token in ask.stop_token_ids:
        try:
            at = job.tokens.index(token, max(0, ask.min_tokens - 1))
        except ValueError:
            continue
        if best is None or at + 1 < best[0]:
            best = (at + 1, at + 1 if ask.include_stop else at, token)
    if best is None:
        return ""
    job.output, job.cut, job.stop_reason = best
    del job.tokens[job.output :]
    return "stop"
