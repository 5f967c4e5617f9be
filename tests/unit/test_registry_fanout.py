"""Starters that read behind starters: the ranking decides, and a model of links tells what it costs."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from readyplane.core.startup import WeightTier
from readyplane_registry.fanout import Above, Chain
from readyplane_registry.rates import DEFAULT_POLICY, allowance, headroom
from readyplane_registry.sources import Candidate, Ranking, Target, rank

MB = 10**6
CHUNKS, CHUNK_BYTES = 250, 4 * MB
SIZE_BYTES = CHUNKS * CHUNK_BYTES
EGRESS = 1000.0 * MB
ALONE_S = SIZE_BYTES / EGRESS


@dataclass
class Starter:
    """One that loads: how many chunks it has (in order), and whom it reads from."""

    name: str
    begins_s: float = 0.0
    chunks: float = 0.0
    parent: str = ""
    done_s: float | None = None
    dead: bool = False
    parents: list[str] = field(default_factory=list)


class Links:
    """Every source gives `EGRESS` bytes/s in all, shared alike by its readers; ingress is free.

    A starter plans as it may: with what the live store would show of places and of chunks held. One
    place is given at a time, and whoever saw fewer readers plans anew, as `readers_seen` has it.
    """

    def __init__(self, starters: list[Starter], *, root: Candidate, chain: bool = True) -> None:
        self.starters = {s.name: s for s in starters}
        self.root, self.chain, self.now_s = root, chain, 0.0

    def readers(self, name: str) -> int:
        return sum(s.parent == name and s.done_s is None for s in self.starters.values())

    def candidates(self, wanted: Starter) -> list[Candidate]:
        found = [replace(self.root, readers=self.readers(self.root.source_id))]
        for one in self.starters.values() if self.chain else ():
            if one.dead or one.begins_s > self.now_s:
                continue
            lacks = CHUNKS - max(int(one.chunks), int(wanted.chunks))
            found.append(
                Candidate(
                    source_id=one.name,
                    tier=WeightTier.L1_HOST,
                    url=f"http://{one.name}",
                    worker_id=one.name,
                    incarnation=one.name,
                    announced_bytes_per_s=EGRESS,
                    readers=self.readers(one.name),
                    readers_max=4,
                    expires_in_s=10.0,
                    partial=one.done_s is None,
                    lacks_bytes=0 if one.done_s is not None else lacks * CHUNK_BYTES,
                    reads_from=(one.parent,) if one.parent else (),
                )
            )
        return found

    def plan(self, starter: Starter) -> Ranking:
        left = (CHUNKS - int(starter.chunks)) * CHUNK_BYTES
        target = Target(starter.name, starter.name, chunk_bytes=CHUNK_BYTES)
        return rank(self.candidates(starter), target=target, size_bytes=left, tiers={})

    def step(self, step_s: float) -> None:
        for one in self.starters.values():
            if one.parent or one.done_s is not None or one.dead or one.begins_s > self.now_s:
                continue
            sources = self.plan(one).sources
            if sources:
                one.parent = sources[0].candidate.source_id
                one.parents.append(one.parent)
        held = {s.name: s.chunks for s in self.starters.values()}
        for one in self.starters.values():
            if not one.parent or one.done_s is not None or one.dead:
                continue
            gone = step_s * EGRESS / self.readers(one.parent) / CHUNK_BYTES
            # Only chunks that the parent has whole can be read.
            limit = CHUNKS if one.parent not in held else int(held[one.parent])
            one.chunks = max(one.chunks, min(one.chunks + gone, limit))
            if one.chunks >= CHUNKS:
                one.done_s = self.now_s + step_s
        self.now_s += step_s

    def run(self, *, at: Callable[[float], None] = lambda _now_s: None) -> float:
        """Until everybody is done; the time of the last, and it never takes for ever."""
        for _ in range(20_000):
            if all(s.done_s is not None or s.dead for s in self.starters.values()):
                return max(s.done_s for s in self.starters.values() if s.done_s is not None)
            at(self.now_s)
            self.step(0.0005)
        raise AssertionError({s.name: (s.chunks, s.parent) for s in self.starters.values()})


ROOT = Candidate(
    "w0", WeightTier.L1_HOST, "http://w0", worker_id="w0", incarnation="w0",
    announced_bytes_per_s=EGRESS, readers_max=8, expires_in_s=10.0,
)  # fmt: skip
STORAGE = Candidate(
    "storage:r", WeightTier.L4_OBJECT, "http://s", storage=True, readers_max=8,
    announced_bytes_per_s=EGRESS,
)  # fmt: skip


def eight() -> list[Starter]:
    return [Starter(f"s{i}") for i in range(1, 9)]


@pytest.mark.parametrize("root", [ROOT, STORAGE], ids=["a ready worker", "the store"])
def test_eight_starters_of_one_source_take_little_longer_than_one(root: Candidate) -> None:
    (alone,) = [Links([Starter("s1")], root=root).run()]
    links = Links(eight(), root=root)
    together = links.run()
    assert alone == pytest.approx(ALONE_S, rel=0.02)
    assert together <= 1.5 * alone, {s.name: (s.done_s, s.parents) for s in links.starters.values()}
    assert sum(s.parent == root.source_id for s in links.starters.values()) == 1, "no herd"
    star = Links(eight(), root=root, chain=False).run()
    assert star > 7.5 * alone, "what it would be without"


def test_later_starters_join_the_chain_behind_those_that_are_furthest_from_full() -> None:
    links = Links([Starter(f"s{i}", begins_s=0.1 * i) for i in range(1, 9)], root=ROOT)
    assert links.run() <= 0.8 + 1.5 * ALONE_S
    assert all(len(s.parents) == 1 for s in links.starters.values())


def test_when_one_in_the_middle_dies_those_behind_it_go_on_where_they_were() -> None:
    links = Links(eight(), root=ROOT)
    kept: dict[str, float] = {}

    def kill(now_s: float) -> None:
        victim = links.starters["s3"]
        if now_s >= 0.4 and not victim.dead:
            victim.dead, victim.parent = True, ""
            for one in links.starters.values():
                if one.parent == "s3":  # its reader's place is gone: it plans with what is missing
                    kept[one.name], one.parent = one.chunks, ""

    together = links.run(at=kill)
    assert kept and all(chunks > 80 for chunks in kept.values()), "nothing is read twice"
    assert together <= 2.0 * ALONE_S
    assert all(s.done_s is not None for s in links.starters.values() if s.name != "s3")


def loading(name: str, lacks_mb: int, *reads_from: str, **fields: object) -> Candidate:
    values: dict[str, object] = {
        "source_id": name,
        "tier": WeightTier.L1_HOST,
        "url": f"http://{name}",
        "worker_id": name,
        "incarnation": name,
        "announced_bytes_per_s": EGRESS,
        "expires_in_s": 10.0,
        "partial": True,
        "lacks_bytes": lacks_mb * MB,
        "reads_from": reads_from,
    }
    return Candidate(**(values | fields))  # type: ignore[arg-type]


def ranking(*candidates: Candidate, me: str = "me") -> Ranking:
    target = Target(me, me, chunk_bytes=CHUNK_BYTES)
    return rank(candidates, target=target, size_bytes=SIZE_BYTES, tiers={})


def test_one_that_still_loads_is_explained_with_whom_it_waits_for() -> None:
    root = replace(ROOT, readers=1)
    found = ranking(root, loading("s1", 600, "w0"))
    first = found.sources[0]
    assert first.candidate.source_id == "s1" and first.complete_in_s == pytest.approx(0.6)
    assert first.predicted_s == pytest.approx(SIZE_BYTES / EGRESS)
    assert "still loading (s1 behind w0), complete in 0.60 s" in first.why


@pytest.mark.parametrize(
    ("candidates", "reason"),
    [
        ((loading("s1", 600),), "it still loads, and from whom is not known"),
        ((loading("s1", 600, "gone"),), "from whom is not known"),
        ((loading("s2", 600, "s1"), loading("s1", 600)), "s2: s1 still loads"),
        ((loading("s1", 600, "me"), loading("me", 900, "w9")), "it reads from the target itself"),
        (
            (loading("s2", 600, "s1"), loading("s1", 600, "me"), loading("me", 900, "w9")),
            "s2: it reads from the target itself",
        ),
        ((loading("s1", 600, "s2"), loading("s2", 600, "s1")), "wait for one another"),
        ((replace(ROOT, draining=True),), "it leaves and takes no new readers"),
        ((replace(ROOT, layout_digest="packed"),), "its layout is packed, needed is that of the"),
        ((replace(ROOT, slo_share=0.96),), "its own requests take 96%"),
    ],
)
def test_whom_nobody_should_wait_for_is_left_out_with_the_reason(
    candidates: tuple[Candidate, ...], reason: str
) -> None:
    found = ranking(*candidates)
    assert any(reason in told for told in found.excluded), found.excluded
    assert not any(reason in told for told in ranking(ROOT, loading("s1", 9, "w0")).excluded)


def test_who_finds_nobody_is_told_when_to_ask_again_if_somebody_is_in_sight() -> None:
    assert ranking(loading("s1", 600)).retry_after_s == pytest.approx(0.2)
    assert ranking(replace(ROOT, barred="lied", barred_for_s=7.0)).retry_after_s == 7.0
    assert ranking().retry_after_s is None
    assert ranking(ROOT).retry_after_s is None


def test_a_chain_is_not_extended_for_ever() -> None:
    many = [loading("s0", 900, "w0")] + [loading(f"s{i}", 900, f"s{i - 1}") for i in range(1, 40)]
    names = [r.candidate.source_id for r in ranking(ROOT, *many).sources]
    assert f"s{DEFAULT_POLICY.behind_max - 1}" in names
    assert f"s{DEFAULT_POLICY.behind_max}" not in names


def test_who_would_take_much_longer_than_the_store_is_not_waited_for() -> None:
    slow = loading("s1", 3000, "w0", announced_bytes_per_s=EGRESS)
    found = ranking(replace(ROOT, readers=1), slow, STORAGE)
    assert [r.candidate.source_id for r in found.sources] == ["w0", "storage:r"]
    assert any("still loads and would take" in told for told in found.excluded)


def test_each_link_of_a_chain_adds_a_chunk_and_the_slowest_one_counts() -> None:
    rates = {"w0": EGRESS, "s1": EGRESS / 4, "s2": EGRESS}
    chain = Chain(
        [ROOT, loading("s1", 400, "w0", readers=1), loading("s2", 400, "s1")],
        rate_of=lambda c: rates[c.source_id], chunk_bytes=CHUNK_BYTES, behind_max=8,
    )  # fmt: skip
    above = chain.above(loading("s2", 400, "s1"))
    assert isinstance(above, Above) and above.names == ("s1", "w0")
    assert above.complete_in_s == pytest.approx(1.6), "400 MB at a quarter of the rate"


@pytest.mark.parametrize(
    ("share", "left"), [(None, 1.0), (0.2, 1.0), (0.7, 1.0), (0.825, 0.5), (0.95, 0.0), (3.0, 0.0)]
)
def test_serving_comes_first_and_giving_takes_what_is_left(
    share: float | None, left: float
) -> None:
    assert headroom(share) == pytest.approx(left)
    told = allowance(EGRESS, share, 2)
    if left == 1.0:
        assert told == 0.0, "no bound beside the source's own"
    else:
        assert told == pytest.approx(EGRESS / 2 * max(left, 0.05)), "slowed, never 0 for no bound"
    assert allowance(0.0, share, 2) == 0.0, "nothing is known to take a share of"
