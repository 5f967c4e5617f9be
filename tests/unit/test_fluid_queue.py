"""The fluid's queues against closed forms: waiting, backlog, processor sharing, shares of rows."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from readyplane import profiles
from readyplane.core.work import Slo
from readyplane_lab.simulator.fluid.decode import Batch, DecodePool, Ends
from readyplane_lab.simulator.fluid.fleet import FluidWorker
from readyplane_lab.simulator.fluid.prefill import Servers, Stream
from readyplane_router.pair import PairPolicy
from readyplane_router.policy import RouterPolicy

PROFILE = profiles.load("h100-tp4-llama70b")
A, B, C = PROFILE.decode_coefficients_s()


def worker(name: str, pool: str = "prefill") -> FluidWorker:
    made = FluidWorker(name, pool, 1, PROFILE, "", 0.0)
    made.ready_s = 0.0
    return made


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def waits(
    pool: type[Servers | Stream],
    at_s: list[float],
    service_s: list[float],
    *,
    servers: int,
    weight: float = 1.0,
    step_s: float = 1.0,
) -> np.ndarray:
    """Seconds that each row waited, with nothing behind the prefill pool."""
    rows = len(at_s)
    queue = pool([100.0] * rows, [weight] * rows, service_s, list(at_s))
    for number in range(servers):
        queue.join(worker(f"p{number}"), 0.0)
    waited = np.full(rows, np.nan)

    def done(row: int, _worker: FluidWorker | None, end_s: float) -> None:
        waited[row] = end_s - service_s[row] - at_s[row]

    row, now_s = 0, 0.0
    while row < rows or queue.queue.rows:
        while row < rows and at_s[row] < now_s + step_s:
            queue.queue.push(row, 100.0, weight)
            row += 1
        queue.serve(now_s, now_s + step_s, lambda _row, _at_s: True, done)
        now_s += step_s
    return waited


def erlang_c_wait_s(servers: int, busy: float, service_s: float) -> float:
    """Mean wait of M/M/c."""
    load = servers * busy
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) / (1.0 - busy)
    return last / (sum(terms) + last) * service_s / (servers * (1.0 - busy))


def constant_wait_s(servers: int, busy: float, service_s: float) -> float:
    """Mean wait of M/D/c: Pollaczek and Khinchine for one server, else Cosmetatos' correction."""
    root = math.sqrt(4.0 + 5.0 * servers) - 2.0
    factor = 1.0 + (1.0 - busy) * (servers - 1) * root / (16.0 * busy * servers)
    return erlang_c_wait_s(servers, busy, service_s) / 2.0 * factor


@pytest.mark.parametrize(("servers", "busy"), [(1, 0.6), (1, 0.8), (3, 0.7), (8, 0.8)])
def test_requests_of_one_length_wait_as_in_m_d_c(servers: int, busy: float) -> None:
    service_s, rows = 0.1, 40_000
    gaps = generator(7).exponential(service_s / (servers * busy), rows)
    waited = waits(Servers, np.cumsum(gaps).tolist(), [service_s] * rows, servers=servers)
    assert waited.mean() == pytest.approx(constant_wait_s(servers, busy, service_s), rel=0.12)


def test_each_request_waits_for_the_server_that_is_free_first() -> None:
    draws = generator(11)
    at_s = np.cumsum(draws.exponential(0.04, 3000)).tolist()
    lengths = draws.lognormal(-2.3, 0.8, 3000).tolist()
    free_s, want_s = [0.0] * 3, []
    for at, length in zip(at_s, lengths, strict=True):
        first = heapq.heappop(free_s)
        want_s.append(max(0.0, first - at))
        heapq.heappush(free_s, max(first, at) + length)
    assert waits(Servers, at_s, lengths, servers=3) == pytest.approx(np.array(want_s), abs=1e-9)


def test_requests_of_random_length_wait_as_in_m_m_c() -> None:
    service_s, servers, busy, rows = 0.1, 4, 0.8, 40_000
    draws = generator(3)
    at_s = np.cumsum(draws.exponential(service_s / (servers * busy), rows))
    lengths = draws.exponential(service_s, rows)
    waited = waits(Servers, at_s.tolist(), lengths.tolist(), servers=servers)
    assert waited.mean() == pytest.approx(erlang_c_wait_s(servers, busy, service_s), rel=0.12)


@pytest.mark.parametrize(("servers", "busy"), [(4, 0.7), (16, 0.9)])
def test_rows_of_many_requests_wait_as_in_m_d_c(servers: int, busy: float) -> None:
    service_s, weight, rows = 0.1, 20.0, 6000
    gap_s = weight * service_s / (servers * busy)
    at_s = [gap_s * k for k in range(rows)]
    waited = waits(Stream, at_s, [service_s] * rows, servers=servers, weight=weight)[500:]
    assert waited.mean() == pytest.approx(constant_wait_s(servers, busy, service_s), rel=0.2)


def test_a_step_in_load_leaves_its_exact_backlog() -> None:
    """One server, twice its load for 30 s, then half of it: each wait follows by hand."""
    service_s = 0.2
    heavy = [0.1 * k for k in range(300)]
    light = [30.0 + 0.4 * k for k in range(300)]
    waited = waits(Servers, heavy + light, [service_s] * 600, servers=1)
    want_s = [0.1 * k for k in range(300)]
    want_s += [max(0.0, 30.0 - 0.2 * k) for k in range(300)]
    assert waited == pytest.approx(np.array(want_s), abs=1e-6)


def test_a_stream_leaves_the_same_backlog() -> None:
    """Ten workers, twice their load for 30 s: the k-th second's requests wait k + 1/2 seconds."""
    service_s, servers = 0.1, 10
    heavy = [float(k) for k in range(30)]
    light = [30.0 + k for k in range(60)]
    rows = len(heavy) + len(light)
    queue = Stream([100.0] * rows, [200.0] * 30 + [50.0] * 60, [service_s] * rows, heavy + light)
    for number in range(servers):
        queue.join(worker(f"p{number}"), 0.0)
    waited = np.zeros(rows)

    def done(row: int, _worker: FluidWorker | None, end_s: float) -> None:
        waited[row] = end_s - service_s - (heavy + light)[row]

    for second in range(120):
        if second < rows:
            queue.queue.push(second, 100.0, 1.0)
        queue.serve(float(second), second + 1.0, lambda _row, _at_s: True, done)
    # a row's requests come evenly over its second and are served over two
    assert waited[:30] == pytest.approx(np.arange(30) + 0.5, abs=1e-6)
    left = [30.0 - 0.5 * k - 0.25 for k in range(60)]
    assert waited[30:85] == pytest.approx(np.array(left[:55]), abs=1e-6)


def played(batch: Batch, isl: list[float], osl: list[float], step_s: float = 0.5) -> Ends:
    ends = Ends()
    for step in range(2000):
        batch.advance((step + 1) * step_s, isl, osl, ends)
    return ends


def test_equal_sequences_end_when_their_iterations_add_up() -> None:
    isl, osl = [800.0] * 6, [120.0] * 6
    batch = Batch(PROFILE, [worker("d", "decode")], 0.0)
    batch.joining = [(0.0, row, 1.0) for row in range(6)]
    ends = played(batch, isl, osl)
    # a token for each of six sequences an iteration: the KV grows by six
    by_hand_s = sum(A + B * 6 + C * (6 * 800.0 + 6 * k) for k in range(120))
    assert len(ends.last) == 6
    assert all(at_s == pytest.approx(by_hand_s, rel=1e-3) for at_s, *_ in ends.last)
    assert batch.tokens == pytest.approx(720.0)
    assert (batch.n, batch.kv) == (0.0, 0.0)


def test_who_leaves_makes_room_for_the_others() -> None:
    isl, osl = [1000.0, 1000.0], [50.0, 150.0]
    batch = Batch(PROFILE, [worker("d", "decode")], 0.0)
    batch.joining = [(0.0, 0, 1.0), (0.0, 1, 1.0)]
    ends = played(batch, isl, osl)
    both_s = sum(A + B * 2 + C * (2000.0 + 2 * k) for k in range(50))
    alone_s = sum(A + B + C * (1050.0 + k) for k in range(100))
    assert ends.last[0][0] == pytest.approx(both_s, rel=1e-3)
    assert ends.last[1][0] == pytest.approx(both_s + alone_s, rel=1e-3)


def test_the_step_does_not_matter() -> None:
    draws = generator(5)
    isl, osl = draws.uniform(100, 3000, 40).tolist(), draws.uniform(1, 300, 40).tolist()
    found = []
    for step_s in (0.05, 0.5):
        batch = Batch(PROFILE, [worker("d", "decode")], 0.0)
        batch.joining = sorted((float(t), row, 1.0) for row, t in enumerate(np.arange(40) * 0.3))
        found.append([at_s for at_s, *_ in played(batch, isl, osl, step_s).last])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_batches_that_part_and_join_keep_every_share() -> None:
    isl, osl = [500.0] * 8, [400.0] * 8
    four = [worker(f"d{k}", "decode") for k in range(4)]
    batch = Batch(PROFILE, four, 0.0)
    batch.joining = [(0.0, row, 4.0) for row in range(8)]
    batch.promised_n, batch.promised_kv = 32.0, 16_000.0
    ends = Ends()
    batch.advance(3.0, isl, osl, ends)
    before = (batch.n, batch.kv, batch.promised_n, batch.promised_kv)
    alone = batch.split(four[0], isl)
    assert alone.n == pytest.approx(before[0] / 4)
    assert alone.iteration_s() == pytest.approx(batch.iteration_s())
    batch.merge(alone)
    assert (batch.n, batch.kv, batch.promised_n, batch.promised_kv) == pytest.approx(before)
    for step in range(3, 60):
        batch.advance(step + 1.0, isl, osl, ends)
    assert sum(part for _, _, part, _ in ends.last) == pytest.approx(32.0)


def pool(*, apart: bool, tpot_s: float = 0.05) -> DecodePool:
    policy = RouterPolicy(pair=PairPolicy(slo=Slo(2.0, tpot_s)))
    return DecodePool(PROFILE, policy, [1000.0] * 1000, apart=apart)


def book_all(decode: DecodePool, weight: float, count: int, now_s: float) -> float:
    """Weight that finds a place."""
    booked = 0.0
    for _ in range(count):
        parts = decode.book(1000.0, weight, expected=200.0, reserved=400.0, now_s=now_s)
        booked += sum(part for _, part in parts)
    return booked


def test_a_decode_worker_takes_what_keeps_its_time_per_token() -> None:
    decode = pool(apart=True)
    decode.join(worker("d", "decode"), 0.0)
    booked = int(book_all(decode, 1.0, 500, 60.0))
    last_s = A + B * booked + C * (1000.0 * (booked - 1) + 1100.0)
    bound_s = PairPolicy().tpot_admit * 0.05
    assert last_s <= bound_s < last_s + B + C * 1000.0


def test_many_workers_take_as_many_each() -> None:
    one, four = pool(apart=True), pool(apart=False)
    one.join(worker("d", "decode"), 0.0)
    for k in range(4):
        four.join(worker(f"d{k}", "decode"), 0.0)
    four.merge()
    alone = book_all(one, 1.0, 500, 60.0)
    assert book_all(four, 2.0, 500, 60.0) / 4 == pytest.approx(alone, abs=1.0)


def test_a_new_decode_worker_is_filled_slowly() -> None:
    decode = pool(apart=True)
    decode.join(worker("d", "decode"), 0.0)
    assert book_all(decode, 1.0, 500, 1.0) == RouterPolicy().ramp_sequences


def test_new_capacity_is_filled_first_where_rows_are_many_requests() -> None:
    decode = pool(apart=False)
    for k in range(2):
        decode.join(worker(f"d{k}", "decode"), 0.0)
    decode.merge()
    book_all(decode, 10.0, 4, 60.0)
    decode.join(worker("new", "decode"), 60.0)
    parts = decode.book(1000.0, 4.0, expected=200.0, reserved=400.0, now_s=70.0)
    assert [(len(batch.workers), part) for batch, part in parts] == [(1, 4.0)]


def test_a_prompt_goes_to_the_cache_that_holds_its_prefix_unless_that_is_too_busy() -> None:
    rows, isl = 4, 4096.0
    at_s = [0.0, 10.0, 10.0, 10.0]
    whole_s = PROFILE.prefill_s(isl)
    queue = Servers([isl] * rows, [1.0] * rows, [whole_s] * rows, at_s)
    queue.chains, queue.cached = (((7, 4032.0),),) * rows, [4032.0] * rows
    both = [worker("p0"), worker("p1")]
    for each in both:
        queue.join(each, 0.0)
    ends: dict[int, tuple[str, float]] = {}

    def done(row: int, by: FluidWorker | None, end_s: float) -> None:
        ends[row] = (by.worker_id if by else "", end_s)

    for row in range(rows):
        queue.queue.push(row, isl, 1.0)
    queue.serve(0.0, 20.0, lambda _row, _at_s: True, done)
    rest_s = PROFILE.prefill_s(64.0, 4032.0)
    assert {name for name, _ in list(ends.values())[:3]} == {"p0"}
    # a hit is so much quicker that it is worth a wait behind another hit
    want_s = [whole_s, 10.0 + rest_s, 10.0 + 2 * rest_s]
    assert [ends[row][1] for row in range(3)] == pytest.approx(want_s)
    assert [each.prefixes for each in both] == [{7}, set()]
