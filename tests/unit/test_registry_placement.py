"""Where to start: T_queue + T_artifact + T_runtime_init over (node, source), as tables."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.startup import WeightTier
from readyplane.ports import StartNode
from readyplane_registry.placement import Placed, Start, place
from readyplane_registry.rates import Bandwidth
from readyplane_registry.sources import Candidate

GB = 10**9
STORAGE = Candidate(
    "storage:r", WeightTier.L4_OBJECT, "http://s", storage=True, readers_max=8,
    announced_bytes_per_s=0.5 * GB,
)  # fmt: skip


def cache(node: str, rate: float = 4 * GB) -> Candidate:
    """A node's own folder of verified files."""
    return Candidate(
        f"cache:{node}", WeightTier.L2_NVME, f"file:///cache/{node}", node=node,
        measured=Bandwidth(rate, rate, 3), expires_in_s=9.0,
    )  # fmt: skip


def peer(name: str, rate: float = GB, **fields: object) -> Candidate:
    values: dict[str, object] = {
        "source_id": name,
        "tier": WeightTier.L1_HOST,
        "url": f"http://{name}",
        "worker_id": name,
        "incarnation": name,
        "measured": Bandwidth(rate, rate, 3),
        "expires_in_s": 9.0,
    }
    return Candidate(**(values | fields))  # type: ignore[arg-type]


def placed(nodes: list[StartNode], *candidates: Candidate, starts: int = 1) -> Placed:
    return place(
        nodes, candidates, starts=starts, size_bytes=16 * GB,
        chunk_bytes=4 * 2**20, layout_digest="", tiers={},
    )  # fmt: skip


def first(nodes: list[StartNode], *candidates: Candidate) -> Start:
    return placed(nodes, *candidates).starts[0]


def test_a_node_free_a_little_later_that_holds_the_model_wins() -> None:
    """R8.2: 16 GB from the store take 32 s, from the node's own disk 4 s."""
    cold, warm = StartNode("cold", runtime_init_s=10.0), StartNode("warm", "", 5.0, 10.0)
    found = placed([cold, warm], STORAGE, cache("warm"))
    start = found.starts[0]
    assert (start.node, start.ranked.candidate.source_id) == ("warm", "cache:warm")
    assert start.total_s == pytest.approx(5.0 + 4.0 + 10.0)
    assert "19.00 s on warm = queue 5.00 + artifact 4.00 from cache:warm" in start.why
    (other,) = found.alternatives
    assert other.node == "cold" and other.total_s == pytest.approx(42.0)
    assert first([cold, replace(warm, queue_s=40.0)], STORAGE, cache("warm")).node == "cold"


def test_runtime_init_counts_and_what_is_not_known_is_taken_as_elsewhere() -> None:
    slow, quick, unknown = (
        StartNode("slow", runtime_init_s=60.0),
        StartNode("quick", runtime_init_s=10.0),
        StartNode("unknown"),
    )
    assert first([slow, quick], STORAGE).node == "quick"
    start = first([unknown, slow], STORAGE)
    assert start.node == "slow" or start.runtime_init_s == 60.0
    assert "(as elsewhere)" in first([unknown, replace(slow, queue_s=9.0)], STORAGE).why
    assert "runtime init 0.00 (not known)" in first([unknown], STORAGE).why


def test_a_node_that_takes_bytes_in_slowly_is_bounded_by_that() -> None:
    thin = StartNode("thin", ingress_bytes_per_s=0.1 * GB)
    start = first([thin], peer("w1"))
    assert (
        start.artifact_s == pytest.approx(160.0) and "bounded by the node's 100 MB/s" in start.why
    )
    assert first([thin, StartNode("wide", queue_s=20.0)], peer("w1")).node == "wide"


def test_a_source_in_the_same_rack_or_on_the_node_is_nearer_until_it_was_measured() -> None:
    near = peer("w1", rack="r1", node="n9", measured=Bandwidth(), announced_bytes_per_s=1.0 * GB)
    nodes = [StartNode("a", "r2"), StartNode("b", "r1"), StartNode("n9", "r1", 3.0)]
    assert first(nodes[:2], near).node == "b"
    assert first(nodes, near).node == "b", "the node itself is free later than it gains"
    assert first([*nodes[:2], replace(nodes[2], queue_s=0.5)], near).node == "n9"


def test_eight_starts_from_one_source_are_placed_as_a_chain() -> None:
    nodes = [StartNode(f"n{i}") for i in range(8)]
    found = placed(nodes, peer("w0", readers_max=8, measured=Bandwidth(GB, GB, 3)), starts=8)
    assert len(found.starts) == 8 and len({start.node for start in found.starts}) == 8
    sources = [start.ranked.candidate.source_id for start in found.starts]
    assert sources == ["w0"] + [f"start:{i}" for i in range(1, 8)]
    times = [start.artifact_s for start in found.starts]
    assert times[-1] <= 1.5 * times[0] and all(a <= b for a, b in pairwise(times))


def test_one_that_starts_later_is_no_source_for_one_that_starts_now() -> None:
    nodes = [StartNode("now", runtime_init_s=90.0), StartNode("later", queue_s=30.0)]
    found = placed([nodes[0], replace(nodes[1], runtime_init_s=0.0)], peer("w0"), starts=2)
    assert [s.node for s in found.starts] == ["later", "now"]
    assert [s.ranked.candidate.source_id for s in found.starts] == ["w0", "w0"]


def test_a_node_with_places_for_two_gets_two_and_who_finds_none_is_told() -> None:
    found = placed([StartNode("a", places=2), StartNode("b", places=0)], STORAGE, starts=3)
    assert [s.node for s in found.starts] == ["a", "a"]
    assert any("b: all of its places are given" in told for told in found.excluded)
    assert any("start 3 of 3" in told for told in found.excluded)
    nobody = placed([StartNode("a")])
    assert nobody.starts == () and "node a: nobody gives the artifact" in nobody.excluded


@given(
    st.lists(st.tuples(st.floats(0, 60), st.floats(0, 60)), min_size=1, max_size=6),
    st.sets(st.integers(0, 5)),
)
def test_no_other_node_would_have_been_sooner(
    rows: list[tuple[float, float]], holding: set[int]
) -> None:
    nodes = [StartNode(f"n{i}", "", queue, init) for i, (queue, init) in enumerate(rows)]
    candidates = [STORAGE, *(cache(f"n{i}") for i in sorted(holding))]
    found = placed(nodes, *candidates)
    best = found.starts[0]
    for node in nodes:
        assert best.total_s <= first([node], *candidates).total_s + 1e-9
    assert len(found.alternatives) == len(nodes) - 1
