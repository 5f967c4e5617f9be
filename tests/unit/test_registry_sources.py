"""Who may give bytes to whom, in which order, and what a report means: tables and properties."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.startup import WeightTier
from readyplane_registry.rates import DEFAULT_POLICY, Bandwidth, learn, sample
from readyplane_registry.reports import judge
from readyplane_registry.sources import Candidate, Target, rank

GIB = 1024**3
TARGET = Target("me", "me-life-2", "n1")
STORAGE = Candidate(
    "storage:registry", WeightTier.L4_OBJECT, "http://s/v1/blobs/x", storage=True, readers_max=8
)


def peer(name: str = "p1", **fields: object) -> Candidate:
    values: dict[str, object] = {
        "source_id": name,
        "tier": WeightTier.L1_HOST,
        "url": f"http://{name}/x",
        "worker_id": name,
        "incarnation": f"{name}-life-1",
        "node": "n2",
        "expires_in_s": 10.0,
    }
    return Candidate(**(values | fields))  # type: ignore[arg-type]


def order(*candidates: Candidate, size_bytes: int = GIB, target: Target = TARGET) -> list[str]:
    ranking = rank(candidates, target=target, size_bytes=size_bytes, tiers={})
    return [r.candidate.source_id for r in ranking.sources]


def excluded(*candidates: Candidate, target: Target = TARGET) -> str:
    return "\n".join(rank(candidates, target=target, size_bytes=GIB, tiers={}).excluded)


def measured(rate: float, samples: int = 3) -> Bandwidth:
    return Bandwidth(rate, rate * 1.1, samples)


def test_a_peer_comes_before_storage_and_storage_is_always_there() -> None:
    assert order(STORAGE, peer(readers=2)) == ["p1", "storage:registry"]
    assert order(STORAGE) == ["storage:registry"]
    full = replace(STORAGE, readers=8)
    assert order(full, peer()) == ["p1", "storage:registry"]


def test_the_sooner_peer_comes_first_counting_queue_and_bandwidth() -> None:
    fast_and_busy = peer("busy", measured=measured(1e9), readers=2, readers_max=2)
    slow_and_free = peer("free", measured=measured(0.4e9))
    assert order(fast_and_busy, slow_and_free) == ["free", "busy"]
    very_slow = replace(slow_and_free, measured=measured(0.2e9))
    assert order(fast_and_busy, very_slow) == ["busy", "free"]


def test_the_prediction_is_queue_plus_size_over_bandwidth() -> None:
    free = peer(measured=measured(1e9), readers=1, readers_max=4)
    (ranked,) = rank([free], target=TARGET, size_bytes=2 * 10**9, tiers={}).sources
    assert (ranked.wait_s, ranked.predicted_s) == (0.0, 4.0), "two readers share 1 GB/s"
    full = replace(free, readers=4)
    (ranked,) = rank([full], target=TARGET, size_bytes=2 * 10**9, tiers={}).sources
    assert ranked.wait_s == pytest.approx(8.0 * 4 / 5)
    assert ranked.predicted_s == pytest.approx(8.0 * 4 / 5 + 8.0)


def test_each_place_is_explained_with_the_bound_of_the_best_measured_bandwidth() -> None:
    one = peer(measured=Bandwidth(5e8, 1e9, 7))
    (ranked,) = rank([one], target=TARGET, size_bytes=10**9, tiers={}).sources
    assert ranked.bound_s == pytest.approx(1.0)
    for said in ("place 1", "tier L1", "0 of 2 readers", "500 MB/s", "7 transfers", "bound 1.00 s"):
        assert said in ranked.why, ranked.why
    (ranked,) = rank([peer()], target=TARGET, size_bytes=10**9, tiers={}).sources
    assert ranked.bound_s is None and "no bound measured yet" in ranked.why
    assert "assumed for tier L1 until measured" in ranked.why


def test_what_was_measured_here_counts_before_tier_word_and_assumption() -> None:
    tiers = {WeightTier.L1_HOST: measured(3e8)}

    def rate(candidate: Candidate, known: dict[WeightTier, Bandwidth]) -> float:
        (ranked,) = rank([candidate], target=TARGET, size_bytes=1, tiers=known).sources
        return ranked.bandwidth_bytes_per_s

    assert rate(peer(measured=measured(7e8), announced_bytes_per_s=9e9), tiers) == 7e8
    assert rate(peer(announced_bytes_per_s=9e9), tiers) == 3e8, "no boasting once measured"
    assert rate(peer(announced_bytes_per_s=2e8), {}) == 2e8
    assert rate(peer(), {}) == DEFAULT_POLICY.prior_bytes_per_s[WeightTier.L1_HOST]
    near = rate(peer(node="n1"), {})
    assert near == DEFAULT_POLICY.prior_bytes_per_s[WeightTier.L1_HOST] * 1.5


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (peer("x", worker_id="me", incarnation="me-life-2"), "the target itself"),
        (peer("x", worker_id="me", incarnation="me-life-1"), "an earlier life of it"),
        (peer("x", incarnation="me-life-2"), "the target itself"),
        (peer(expires_in_s=-3.0), "expired 3.0 s ago"),
        (peer(expires_in_s=0.0), "expired"),
        (peer(barred="quarantined for wrong bytes", barred_for_s=60), "wrong bytes; offered again"),
        (peer(url="file:///cache", tier=WeightTier.L2_NVME), "node n2, the target is elsewhere"),
    ],
)
def test_who_must_not_be_offered_is_left_out_with_the_reason(
    candidate: Candidate, reason: str
) -> None:
    assert reason in excluded(candidate, STORAGE)
    assert order(candidate, STORAGE) == ["storage:registry"]


def test_b144_a_restart_at_the_same_address_is_never_offered_to_itself() -> None:
    """B144: the old record is fresh, the new process asks under its new incarnation."""
    old = peer("me/old", worker_id="me", incarnation="me-life-1", url="http://10.0.0.1:80/x")
    assert order(old, STORAGE) == ["storage:registry"]


def test_of_two_records_at_one_address_the_later_one_counts() -> None:
    old = peer("old", url="http://10.0.0.1:80/x", announced_ago_s=50.0)
    new = peer("new", url="http://10.0.0.1:80/x", announced_ago_s=1.0)
    assert order(old, new) == ["new"]
    assert "its address now belongs to new" in excluded(old, new)
    assert order(old, replace(new, expires_in_s=-1.0)) == ["old"], "an expired one owns nothing"


def test_a_folder_of_a_node_belongs_to_all_its_workers() -> None:
    caches = [
        peer(name, url="file:///cache", node="n1", tier=WeightTier.L2_NVME) for name in ("a", "b")
    ]
    assert sorted(order(*caches)) == ["a", "b"]


def test_a_peer_measured_far_slower_than_storage_is_left_out() -> None:
    storage = replace(STORAGE, measured=measured(8e8))
    slow, fair = peer("slow", measured=measured(1e8)), peer("fair", measured=measured(4e8))
    assert order(storage, slow, fair) == ["fair", "storage:registry"]
    assert "slow: its measured 100 MB/s" in excluded(storage, slow, fair)
    unmeasured = peer("unmeasured", announced_bytes_per_s=1e6)
    assert "unmeasured" in order(storage, unmeasured), "only what was measured counts against it"


CANDIDATES = st.lists(
    st.builds(
        peer,
        name=st.sampled_from([f"p{i}" for i in range(12)]),
        worker_id=st.sampled_from(["me", "a", "b", ""]),
        incarnation=st.sampled_from(["me-life-1", "me-life-2", "x", ""]),
        url=st.sampled_from(["http://a/x", "http://b/x", "http://c/x"]),
        expires_in_s=st.sampled_from([-1.0, 0.0, 5.0]),
        barred=st.sampled_from(["", "lied"]),
        readers=st.integers(0, 4),
        readers_max=st.integers(1, 3),
        measured=st.sampled_from([Bandwidth(), measured(1e7), measured(1e9)]),
    ),
    max_size=8,
    unique_by=lambda c: c.source_id,
)


@given(CANDIDATES, st.integers(0, 10**12), st.randoms(use_true_random=False))
def test_every_source_is_either_placed_or_excluded_and_the_order_depends_on_facts_alone(
    candidates: list[Candidate], size_bytes: int, rng: object
) -> None:
    everyone = [*candidates, STORAGE]
    ranking = rank(everyone, target=TARGET, size_bytes=size_bytes, tiers={})
    placed = [r.candidate for r in ranking.sources]
    out = [text.split(": ")[0] for text in ranking.excluded if not text.startswith("storage")]
    assert sorted([c.source_id for c in placed] + out) == sorted(c.source_id for c in everyone)
    assert placed[-1] == STORAGE
    for c in placed[:-1]:
        assert c.worker_id != "me" and c.incarnation != "me-life-2"
        assert c.expires_in_s is not None and c.expires_in_s > 0 and not c.barred
    assert len({c.url for c in placed}) == len(placed)
    seconds = [r.predicted_s for r in ranking.sources[:-1]]
    assert seconds == sorted(seconds)
    rng.shuffle(everyone)  # type: ignore[attr-defined]
    assert rank(everyone, target=TARGET, size_bytes=size_bytes, tiers={}) == ranking


def test_later_starters_fan_out_from_earlier_ones() -> None:
    """R8.4: 16 starters, one peer and a store that gives one reader at a time 1 GB/s each.

    Whoever has finished gives in turn. With two places a source, the swarm grows by steps, no
    source ever has more readers than places, and all are done far sooner than one after another.
    """
    size, rate, places = 10**9, 1e9, 2
    holders: dict[str, int] = {"w0": 0}
    running: list[tuple[float, str, str]] = []
    waiting = [f"w{i}" for i in range(1, 17)]
    now, most = 0.0, 0
    while waiting or running:
        still: list[str] = []
        for name in waiting:
            seen = [
                peer(h, readers=n, readers_max=places, measured=measured(rate))
                for h, n in holders.items()
            ]
            ranking = rank(
                seen, target=Target(name, f"{name}-1"), size_bytes=size, tiers={}
            ).sources
            free = [r for r in ranking if r.candidate.readers < places]
            if not free:
                still.append(name)
                continue
            chosen = free[0].candidate.source_id
            holders[chosen] += 1
            most = max(most, holders[chosen])
            heapq.heappush(running, (now + places * size / rate, name, chosen))
        waiting = still
        now, name, chosen = heapq.heappop(running)
        holders[chosen] -= 1
        holders[name] = 0
    assert most <= places
    assert len(holders) == 17
    assert now <= 3 * 2.0, "three rounds of two seconds: 1 -> 3 -> 9 -> 17 holders"


@pytest.mark.parametrize(
    ("transferred", "elapsed_s", "rate"),
    [
        (100 * 2**20, 2.0, 50 * 2**20),
        (10, 1.0, None),
        (100 * 2**20, 0.0, None),
        (2**62, 5e-324, None),
    ],
)
def test_what_a_transfer_shows(transferred: int, elapsed_s: float, rate: float | None) -> None:
    found = sample(
        transferred_bytes=transferred, elapsed_s=elapsed_s, readers_before=1, readers_after=1
    )
    assert found == rate


@given(st.lists(st.floats(1.0, 1e12), min_size=1, max_size=30))
def test_an_average_stays_between_the_extremes_and_remembers_the_best(rates: list[float]) -> None:
    known = Bandwidth()
    for rate in rates:
        known = learn(known, rate, weight=0.3)
    assert min(rates) * 0.999 <= known.mean_bytes_per_s <= max(rates) * 1.001
    assert known.best_bytes_per_s == max(rates)
    assert known.samples == len(rates)


@pytest.mark.parametrize(
    ("failure", "storage", "accused", "outcome", "bar_s"),
    [
        ("", False, 0, "ok", 0.0),
        ("corrupt: chunk 3 of a.safetensors", False, 0, "corrupt", 120.0),
        ("corrupt", False, 1, "corrupt", 120.0),
        ("corrupt", False, 2, "disbelieved", 0.0),
        ("corrupt", True, 0, "corrupt", 0.0),
        ("dead: connection refused", False, 0, "dead", 10.0),
        ("slow", False, 5, "slow", 10.0),
        ("dead", True, 0, "dead", 0.0),
        ("tired", False, 0, "other", 0.0),
    ],
)
def test_what_a_report_means(
    failure: str, storage: bool, accused: int, outcome: str, bar_s: float
) -> None:
    verdict = judge(failure, storage=storage, accused_before=accused)
    assert (verdict.outcome, verdict.bar_s) == (outcome, bar_s)
    assert verdict.quarantine == (outcome == "corrupt" and not storage)
    if bar_s and ":" in failure:
        assert failure.partition(": ")[2] in verdict.reason
