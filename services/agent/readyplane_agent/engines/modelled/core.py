"""The engine model: continuous batching over a class profile, in virtual or real time (pure).

Owns the schedule of one engine: admission first come first served, chunked prefill, block-level
prefix cache, preemption by recompute, and both halves of a KV hand-over. The modelled engine's
process and the simulator run this same class; both hand in `now_s`.

The model of time. An iteration takes the prefill time of its chunk (`profile.prefill_s` of the
chunk given the tokens already computed or cached) plus, when sequences decode, `iteration_s` of
them; both are added, as one forward pass does both. Prompts are computed one after another, one
chunk an iteration, as they were when the profile was measured: batching several short prompts is
not rewarded. Composition changes only between iterations; who comes during one joins at its end.
"""

from __future__ import annotations

import heapq
from collections import deque

from readyplane.core.errors import InvalidField
from readyplane.core.profile import ClassProfile
from readyplane_agent.engines.modelled import core_batch
from readyplane_agent.engines.modelled.core_batch import DecodeBatch, Sequence, Span, State, check
from readyplane_agent.engines.modelled.core_blocks import BlockPool
from readyplane_agent.engines.modelled.core_events import (
    EngineEvent,
    EngineRequest,
    EngineStats,
    Finished,
    KvCleared,
    KvExpired,
    KvRemoved,
    KvStored,
    KvWanted,
    Preempted,
    PrefillDone,
    RequestMode,
    TokensEmitted,
)

HOLD_S = 30.0
_NEVER = float("inf")


class EngineModel:
    """One engine.

    Args:
        profile: its class. block_size: tokens a block. kv_blocks: size of the pool.
        max_batch_tokens: tokens of one iteration. max_num_seqs: sequences prefilling or decoding.
        prefix_caching: whether finished blocks stay findable.
        iteration_factor: multiplies every time (eager start modes run slower).
        hold_s: how long a P leg's KV waits for its reader.
        coalesce_s: None: tokens after the first are told once, at the end; else in groups that
            span at most that many seconds (0: one by one).

    Raises:
        InvalidField: a size that makes no sense.
    """

    def __init__(
        self,
        profile: ClassProfile,
        *,
        block_size: int,
        kv_blocks: int,
        max_batch_tokens: int | None = None,
        max_num_seqs: int | None = None,
        prefix_caching: bool = True,
        iteration_factor: float = 1.0,
        hold_s: float = HOLD_S,
        coalesce_s: float | None = None,
    ) -> None:
        self.profile = profile
        self.block_size = block_size
        self.max_batch_tokens = max_batch_tokens or profile.max_batch_tokens
        self.max_num_seqs = max_num_seqs or profile.max_num_seqs
        core_batch.check_sizes(block_size, kv_blocks, self.max_num_seqs, self.max_batch_tokens)
        self.prefix_caching = prefix_caching
        self.hold_s = hold_s
        self.coalesce_s = coalesce_s
        self._factor = iteration_factor
        a, b, c = profile.decode_coefficients_s()
        self._base, self._per_seq, self._per_token = (v * iteration_factor for v in (a, b, c))
        self.pool = BlockPool(kv_blocks)
        self._all: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._arrived: deque[Sequence] = deque()
        self._batch = DecodeBatch(block_size)
        self._silent: dict[Sequence, None] = {}  # decoding, and nobody has seen a token yet
        self._prefilling: Sequence | None = None
        self._loading = 0
        self._expiries: list[tuple[float, int, Sequence]] = []
        self._ties = 0
        self._held = 0
        self._span: Span | None = None
        self._t = 0.0
        self._flushed_s = 0.0
        self._no_admission_at = -1
        self._events: list[EngineEvent] = []
        self._waiting_prefill = 0
        self._prompt_total = self._computed_total = self._queried_total = self._cached_total = 0
        self._generated_total = self._finished_total = self._aborted_total = 0
        self._preemptions_total = self._expired_total = 0

    # ------------------------------------------------------------------ what happens to it

    def submit(self, request: EngineRequest, now_s: float) -> None:
        """Queue a request.

        Raises:
            InvalidField: an id that is in use, a length below 1, hashes that do not cover the
                prompt's full blocks, or more KV than the whole pool.
        """
        if request.request_id in self._all:
            raise InvalidField("request_id", request.request_id, "use an id that is not in use")
        check(request, block_size=self.block_size, kv_blocks=self.pool.total)
        self._interrupt(now_s)
        sequence = Sequence(request, now_s)
        self._all[request.request_id] = sequence
        self._waiting.append(sequence)
        self._prompt_total += request.prompt_tokens
        if not sequence.remote:
            self._waiting_prefill += sequence.total

    def abort(self, request_id: str, now_s: float) -> bool:
        """Drop a request and free its blocks at once; False when it is not known."""
        sequence = self._all.get(request_id)
        if sequence is None:
            return False
        self._interrupt(now_s)
        if self._all.get(request_id) is not sequence:
            return True  # it ended by itself just before
        if sequence.state is State.HELD:
            self._end_hold(sequence)
            return True
        self._remove(sequence)
        self._release(sequence)
        self._aborted_total += 1
        self._finish(sequence, "abort", now_s)
        return True

    def move_out(self, request_id: str, now_s: float) -> int | None:
        """Stop what decodes, hold its KV for who goes on; its output tokens, None if it does not."""
        self._interrupt(now_s)
        sequence = self._all.get(request_id)
        if sequence is None or sequence.state is not State.DECODING:
            return None
        emitted = self._batch.emitted(sequence)
        if emitted:
            self._show(sequence, emitted, now_s)
            self._remove(sequence)
            self._hold(sequence, now_s)
            self._held += 1
            self._finish(sequence, "moved", now_s, held=True)
        return emitted or None

    def kv_arrived(self, request_id: str, now_s: float) -> bool:
        """The KV that `KvWanted` asked for is there; False when nobody waits for it any more."""
        sequence = self._all.get(request_id)
        if sequence is None or sequence.state is not State.LOADING:
            return False
        self._interrupt(now_s)
        self._loading -= 1
        sequence.state, sequence.remote = State.ARRIVED, False
        self._publish(sequence, (sequence.request.prompt_tokens - 1) // self.block_size, now_s)
        self._arrived.append(sequence)
        return True

    def kv_failed(self, request_id: str, now_s: float) -> bool:
        """The KV cannot be had: the request finishes with `error`."""
        sequence = self._all.get(request_id)
        if sequence is None or sequence.state is not State.LOADING:
            return False
        self._interrupt(now_s)
        self._remove(sequence)
        self._release(sequence)
        self._finish(sequence, "error", now_s)
        return True

    def kv_pulled(self, request_id: str, now_s: float) -> bool:
        """A reader has taken a held KV; False when it is not held (any more)."""
        sequence = self._all.get(request_id)
        if sequence is None or sequence.state is not State.HELD:
            return False
        self._interrupt(now_s)
        if self._all.get(request_id) is not sequence:
            return False  # it expired just before
        self._end_hold(sequence)
        return True

    def kv_extend(self, request_id: str, now_s: float) -> bool:
        """A reader says that it will come: the hold lasts `hold_s` from now."""
        sequence = self._all.get(request_id)
        if sequence is None or sequence.state is not State.HELD or sequence.expires_s <= now_s:
            return False
        self._hold(sequence, now_s)
        return True

    def reset_prefix_cache(self, now_s: float) -> bool:
        """Forget idle blocks; True (and `KvCleared`) when no block is cached any more."""
        self._interrupt(now_s)
        gone = self.pool.clear()
        if not self.pool.shared:
            self._events.append(KvCleared(now_s))
        elif gone:
            self._events.append(KvRemoved(tuple(gone), now_s))
        return not self.pool.shared

    # ------------------------------------------------------------------ time

    def next_event_s(self) -> float | None:
        """When `advance` next has something to tell, None while nothing can happen by itself."""
        if self._events:
            return self._t
        span = self._span
        if span is not None and span.target:
            when = span.target_s
        else:
            when = self._next_boundary()
            if self._events:
                return self._t
        if self._expiries:
            when = min(when, self._next_expiry())
        return None if when == _NEVER else when

    def advance(self, now_s: float) -> list[EngineEvent]:
        """Let time pass up to `now_s`; what happened, in order."""
        self._run(now_s)
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """Gauges and counters as of the last `advance`."""
        return EngineStats(
            waiting=len(self._waiting),
            running=self._running() + len(self._arrived),
            loading=self._loading,
            held=self._held,
            waiting_prefill_tokens=self._waiting_prefill,
            kv_used_blocks=self.pool.used,
            kv_cached_blocks=self.pool.idle,
            kv_total_blocks=self.pool.total,
            prompt_tokens_total=self._prompt_total,
            computed_tokens_total=self._computed_total,
            queried_tokens_total=self._queried_total,
            cached_tokens_total=self._cached_total,
            generated_tokens_total=self._generated_total,
            finished_total=self._finished_total,
            aborted_total=self._aborted_total,
            preemptions_total=self._preemptions_total,
            iterations_total=self._batch.iteration,
            kv_expired_total=self._expired_total,
        )

    def is_idle(self) -> bool:
        """No sequence queued, running or loading, and no KV held for a reader."""
        return not self._all

    # ------------------------------------------------------------------ inside: the loop

    def _run(self, now_s: float) -> None:
        while True:
            span = self._span
            if span is not None and span.target:
                boundary = span.target_s
            else:
                boundary = self._next_boundary()
            expiry = self._next_expiry() if self._expiries else _NEVER
            if expiry <= now_s and expiry <= boundary:
                self._expire(expiry)
            elif boundary <= now_s:
                self._at_boundary(boundary)
            else:
                break
        self._progress(now_s)

    def _interrupt(self, now_s: float) -> None:
        """Run up to `now_s`; the iteration under way is the last one with this composition."""
        self._run(now_s)
        self._cut(now_s)

    def _cut(self, now_s: float) -> None:
        span = self._span
        if span is None:
            self._t = max(self._t, now_s)
        elif span.end(span.done) >= now_s:
            self._t = span.end(span.done)
            self._span = None
        else:
            span.most, span.target = span.done + 1, 0

    def _next_boundary(self) -> float:
        """End of the iteration at which something must be decided or told."""
        span = self._span
        if span is None:
            if not (self._batch.members or self._waiting or self._arrived or self._prefilling):
                return _NEVER
            span = self._span = self._plan()
            if span is None:
                return _NEVER
        if not span.target:
            span.target = span.most
            if self._silent:
                span.target = span.done + 1  # a first token is told when it is there
            elif self.coalesce_s is not None and self._batch.members:
                due = span.reached(self._flushed_s + self.coalesce_s, span.most)
                span.target = max(due, span.done + 1)
            span.target_s = span.end(span.target)
        return span.target_s

    def _progress(self, now_s: float) -> None:
        """Count the iterations that have ended, where none of them needs a decision."""
        span = self._span
        if span is None or span.most <= span.done + 1 or span.end(span.done + 1) > now_s:
            return
        if self._batch.members:
            k = span.reached(now_s, span.most)
            if span.done < k < span.most:
                self._complete(span, k, span.end(k))

    def _complete(self, span: Span, k: int, now_s: float) -> None:
        """Account for iterations `done + 1 … k`: tokens, KV tokens, blocks."""
        count = k - span.done
        batch = self._batch
        sequences = len(batch.members)
        if sequences:
            blocks = batch.blocks_for(count)
            if blocks:
                self.pool.take(blocks)
                self._told_evictions(now_s)
            self._generated_total += sequences * count
        batch.step(count)
        span.done = k

    def _at_boundary(self, now_s: float) -> None:
        span = self._span
        assert span is not None
        self._complete(span, span.target, now_s)
        span.target = 0
        if self._silent:
            for sequence in self._silent:
                self._show(sequence, self._batch.emitted(sequence), now_s)
            self._silent.clear()
        if span.done >= span.most:
            self._span = None
            self._t = now_s
            if span.chunk and self._prefilling is not None:
                self._chunk_done(self._prefilling, span.chunk, now_s)
            self._finish_due(now_s)
        if self.coalesce_s is not None and now_s >= self._flush_due(span):
            for sequence in self._batch.members:
                self._show(sequence, self._batch.emitted(sequence), now_s)
            self._flushed_s = now_s

    def _flush_due(self, span: Span) -> float:
        """From when on tokens are told: at the last boundary before the group grows too long."""
        assert self.coalesce_s is not None
        step = span.alpha + span.beta * span.done
        return self._flushed_s + max(0.0, self.coalesce_s - step)

    # ------------------------------------------------------------------ inside: planning

    def _plan(self) -> Span | None:
        """Decide the iteration that starts at `_t`: who joins, who yields, who is admitted."""
        while self._arrived and self._running() < self.max_num_seqs:
            sequence = self._arrived.popleft()
            self._join(sequence, sequence.request.prompt_tokens - 1)
        if self._batch.members:
            self._make_room()
        # Who was just preempted must not come back at once; but where nobody decodes any more, no
        # later iteration would ask again.
        if self._waiting and (
            self._no_admission_at != self._batch.iteration or not self._batch.members
        ):
            self._admit()
        decoding = len(self._batch.members)
        chunk = 0
        alpha, beta, most = 0.0, 0.0, 1
        prefilling = self._prefilling
        if prefilling is not None:
            chunk = min(prefilling.total - prefilling.computed, self.max_batch_tokens - decoding)
            alpha = self.profile.prefill_s(chunk, prefilling.computed) * self._factor
        if decoding:
            alpha += self._base + self._per_seq * decoding + self._per_token * self._batch.kv_tokens
            beta = self._per_token * decoding
            if not chunk:
                most = self._batch.jump(self.pool.available)
        return Span(self._t, alpha, beta, most, chunk) if decoding or chunk else None

    def _make_room(self) -> None:
        """Preempt the youngest until the next iteration's blocks fit."""
        while self._batch.members and self._batch.blocks_for(1) > self.pool.available:
            self._preempt(self._prefilling or next(reversed(self._batch.members)))

    def _preempt(self, sequence: Sequence) -> None:
        self._show(sequence, self._batch.emitted(sequence), self._t)
        self._remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        sequence.total = sequence.request.prompt_tokens + sequence.emitted
        sequence.computed = sequence.published = 0
        self._waiting.appendleft(sequence)
        self._waiting_prefill += sequence.total
        self._preemptions_total += 1
        self._no_admission_at = self._batch.iteration
        self._events.append(Preempted(sequence.request.request_id, self._t))

    def _admit(self) -> None:
        """Give blocks to the queue's head while they suffice; first come, first served."""
        reserved = self._batch.blocks_for(1) if self._batch.members else 0
        size = self.block_size
        while self._waiting:
            sequence = self._waiting[0]
            remote = sequence.remote
            if not remote and (
                self._prefilling is not None or self._running() >= self.max_num_seqs
            ):
                return
            tokens = sequence.total - 1 if remote else sequence.total
            hits = (
                self.pool.match(sequence.hashes, (sequence.total - 1) // size)
                if self.prefix_caching
                else 0
            )
            shared = sequence.hashes[:hits]
            need = -(-tokens // size) - hits
            if need + self.pool.idle_among(shared) + reserved > self.pool.available:
                return
            self._waiting.popleft()
            self.pool.share(shared)
            self.pool.take(need)
            self._told_evictions(self._t)
            sequence.blocks, sequence.private, sequence.published = shared, need, hits
            self._start(sequence, hits * size, remote=remote)

    def _start(self, sequence: Sequence, cached: int, *, remote: bool) -> None:
        if sequence.started_s is None:
            sequence.started_s = self._t
            sequence.cached = cached
        if self.prefix_caching:
            self._queried_total += sequence.total
            self._cached_total += cached
        if remote:
            sequence.state = State.LOADING
            self._loading += 1
            request = sequence.request
            self._events.append(
                KvWanted(request.request_id, request.prompt_tokens - cached, cached, self._t)
            )
            return
        sequence.state = State.PREFILLING
        sequence.computed = cached
        self._waiting_prefill -= cached
        self._prefilling = sequence

    # ------------------------------------------------------------------ inside: sequences

    def _chunk_done(self, sequence: Sequence, chunk: int, now_s: float) -> None:
        sequence.computed += chunk
        self._computed_total += chunk
        self._waiting_prefill -= chunk
        self._publish(sequence, sequence.computed // self.block_size, now_s)
        if sequence.computed < sequence.total:
            return
        self._prefilling = None
        request = sequence.request
        if not sequence.emitted:
            self._events.append(PrefillDone(request.request_id, sequence.cached, now_s))
        sequence.emitted += 1
        self._generated_total += 1
        self._show(sequence, sequence.emitted, now_s)
        if request.mode is RequestMode.REMOTE_DECODE:
            self._hold(sequence, now_s)
            self._held += 1
            self._finish(sequence, "length", now_s, held=True)
        elif sequence.emitted >= request.output_tokens:
            self._release(sequence)
            self._finish(sequence, request.finish_reason, now_s)
        else:
            self._join(sequence, sequence.total)

    def _join(self, sequence: Sequence, kv: int) -> None:
        if not self._batch.members:
            self._flushed_s = self._t
        if not sequence.shown:
            self._silent[sequence] = None
        self._batch.join(sequence, kv)

    def _finish_due(self, now_s: float) -> None:
        for sequence in self._batch.due():
            self._show(sequence, self._batch.emitted(sequence), now_s)
            self._remove(sequence)
            self._publish(sequence, sequence.kv // self.block_size, now_s)
            self._release(sequence)
            self._finish(sequence, sequence.request.finish_reason, now_s)

    def _finish(self, sequence: Sequence, reason: str, now_s: float, *, held: bool = False) -> None:
        if not held:
            del self._all[sequence.request.request_id]
            sequence.state = State.GONE
        if reason in ("stop", "length"):
            self._finished_total += 1
        started_s = now_s if sequence.started_s is None else sequence.started_s
        self._events.append(
            Finished(
                sequence.request.request_id,
                reason,
                sequence.emitted,
                now_s,
                held=held,
                queue_s=started_s - sequence.submitted_s,
                prefill_s=max(0.0, (sequence.token_s or now_s) - started_s),
            )
        )

    def _remove(self, sequence: Sequence) -> None:
        """Take a sequence out of wherever it is; its blocks stay its own."""
        if sequence.state is State.DECODING:
            self._batch.leave(sequence)
            self._silent.pop(sequence, None)
        elif sequence.state is State.PREFILLING:
            self._prefilling = None
            self._waiting_prefill -= sequence.total - sequence.computed
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
            if not sequence.remote:
                self._waiting_prefill -= sequence.total
        elif sequence.state is State.LOADING:
            self._loading -= 1
        elif sequence.state is State.ARRIVED:
            self._arrived.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.blocks, sequence.private)
        sequence.blocks, sequence.private = (), 0

    def _publish(self, sequence: Sequence, full: int, now_s: float) -> None:
        """Blocks `published … full` are complete: they join the prefix cache."""
        hashes = sequence.hashes[sequence.published : full]
        if not hashes or not self.prefix_caching:
            return
        new = self.pool.publish(hashes)
        sequence.private -= len(new)
        sequence.blocks += new
        request_id, first = sequence.request.request_id, sequence.published
        sequence.published += len(hashes)
        if len(new) == len(hashes):
            self._events.append(KvStored(request_id, first, hashes, now_s))
            return
        known = set(new)
        for offset, value in enumerate(hashes):
            if value in known:
                self._events.append(KvStored(request_id, first + offset, (value,), now_s))

    def _show(self, sequence: Sequence, emitted: int, now_s: float) -> None:
        if emitted > sequence.shown:
            if not sequence.shown:
                sequence.token_s = now_s
            self._events.append(
                TokensEmitted(sequence.request.request_id, emitted - sequence.shown, now_s)
            )
            sequence.shown = emitted

    # ------------------------------------------------------------------ inside: hand-over

    def _hold(self, sequence: Sequence, now_s: float) -> None:
        sequence.state = State.HELD
        sequence.expires_s = now_s + self.hold_s
        self._ties += 1
        heapq.heappush(self._expiries, (sequence.expires_s, self._ties, sequence))

    def _next_expiry(self) -> float:
        while self._expiries:
            expires_s, _, sequence = self._expiries[0]
            if sequence.state is State.HELD and sequence.expires_s == expires_s:
                return expires_s
            heapq.heappop(self._expiries)
        return _NEVER

    def _expire(self, now_s: float) -> None:
        self._progress(now_s)
        self._cut(now_s)
        sequence = heapq.heappop(self._expiries)[2]
        self._end_hold(sequence)
        self._expired_total += 1
        self._events.append(KvExpired(sequence.request.request_id, now_s))

    def _end_hold(self, sequence: Sequence) -> None:
        self._release(sequence)
        self._held -= 1
        sequence.state = State.GONE
        del self._all[sequence.request.request_id]

    def _told_evictions(self, now_s: float) -> None:
        if self.pool.evicted:
            self._events.append(KvRemoved(tuple(self.pool.evicted), now_s))
            self.pool.evicted = []

    def _running(self) -> int:
        return len(self._batch.members) + (self._prefilling is not None)
