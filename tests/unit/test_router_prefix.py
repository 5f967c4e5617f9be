"""The prefix index against a plain model of it, and the field reports on KV events."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readyplane.core.kv import CPU, DISK, GPU, KvEvent
from readyplane_router.prefix import Limits, PrefixIndex
from readyplane_router.prefix.chains import CHAIN_BLOCKS_MAX, PARTLY_MAX
from readyplane_router.prefix.tiers import TierLoad, worth

STORED, REMOVED, CLEARED = "stored", "removed", "cleared"
LIMITS = Limits(speculative_ttl_s=2.0, approximate_ttl_s=60.0, replay_wait_s=10.0)


def index(*keys: str, blocks_max: int = 1_000) -> PrefixIndex:
    made = PrefixIndex(LIMITS)
    for key in keys:
        made.add(key, blocks_max=blocks_max)
    return made


def tell(
    of: PrefixIndex,
    key: str,
    sequence: int,
    events: Sequence[tuple[str, Sequence[int]]],
    *,
    now_s: float,
    parent: int | None = None,
) -> bool:
    told = [KvEvent(kind, tuple(hashes), parent) for kind, hashes in events]
    return of.apply(key, sequence, told, now_s=now_s)


def matched(of: PrefixIndex, *hashes: int, now_s: float = 0.0) -> dict[str, int]:
    return of.matched(hashes, now_s=now_s)


blocks = st.lists(st.integers(0, 12), max_size=6)
steps = st.lists(
    st.tuples(st.sampled_from("ab"), st.sampled_from([STORED, REMOVED, CLEARED]), blocks),
    max_size=40,
)


@given(steps, st.lists(st.integers(0, 12), min_size=1, max_size=8, unique=True))
def test_what_matches_is_what_a_plain_count_says(
    told: list[tuple[str, str, list[int]]], prompt: list[int]
) -> None:
    of = index("a", "b")
    plain: dict[str, Counter[int]] = {"a": Counter(), "b": Counter()}
    sequence = {"a": 0, "b": 0}
    for key, kind, hashes in told:
        assert tell(of, key, sequence[key], [(kind, hashes)], now_s=0.0)
        sequence[key] += 1
        if kind == CLEARED:
            plain[key].clear()
        for value in hashes if kind != CLEARED else ():
            plain[key][value] += 1 if kind == STORED else -(plain[key][value] > 0)
    want = {}
    for key, held in plain.items():
        depth = next((i for i, h in enumerate(prompt) if held[h] <= 0), len(prompt))
        if depth:
            want[key] = depth
        assert of.blocks_of(key) == sum(1 for count in held.values() if count > 0)
    assert matched(of, *prompt) == want


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.sampled_from(["guess", "store", "drop", "add"]), blocks
        ),
        max_size=40,
    )
)
def test_nothing_is_left_of_workers_that_are_gone(told: list[tuple[str, str, list[int]]]) -> None:
    """B100, B104: an end costs its own blocks and leaves none."""
    of = index()
    now_s, sequence = 0.0, 0
    for key, what, hashes in told:
        now_s += 0.7
        if what == "add":
            of.add(key, blocks_max=5)
            sequence = 0
        elif what == "drop":
            of.drop(key)
        elif what == "guess":
            of.guess(key, hashes, now_s=now_s)
        else:
            tell(of, key, sequence, [(CLEARED, []), (STORED, hashes)], now_s=now_s)
        assert of.blocks_of(key) <= 5
    of.drop("a")
    of.drop("b")
    assert len(of) == 0
    assert matched(of, *range(13), now_s=now_s) == {}


def test_counted_not_set() -> None:
    """B101: S, S, R leaves it held; a doubled batch and a removal too many change nothing."""
    of = index("a")
    tell(of, "a", 0, [(STORED, [1]), (STORED, [1])], now_s=0.0)
    tell(of, "a", 1, [(REMOVED, [1])], now_s=0.0)
    assert matched(of, 1) == {"a": 1}
    assert not tell(of, "a", 1, [(REMOVED, [1])], now_s=0.0)
    assert matched(of, 1) == {"a": 1}
    tell(of, "a", 2, [(REMOVED, [1]), (REMOVED, [1])], now_s=0.0)
    assert matched(of, 1) == {}
    assert (of.counts.duplicates, of.counts.unknown_removed) == (1, 1)


def test_cleared_takes_everything_of_that_worker_and_nothing_else() -> None:
    """B92."""
    of = index("a", "b")
    for key in ("a", "b"):
        tell(of, key, 0, [(STORED, [1, 2])], now_s=0.0)
    of.guess("a", [3], now_s=0.0)
    tell(of, "a", 1, [(CLEARED, [])], now_s=0.0)
    assert matched(of, 1, 2, 3) == {"b": 2}


def test_a_gap_makes_a_worker_suspect_until_it_has_told_everything_anew() -> None:
    """B93: sequence 5 then 9; no hit is credited while suspect."""
    of = index("a", "b")
    for sequence in range(6):
        tell(of, "a", sequence, [(STORED, [sequence])], now_s=0.0)
    tell(of, "b", 0, [(STORED, [0])], now_s=0.0)
    assert not tell(of, "a", 9, [(STORED, [9])], now_s=1.0)
    assert of.suspects() == ("a",)
    assert matched(of, 0, 1) == {"b": 1}
    assert of.counts.gaps == 1
    assert tell(of, "a", 10, [(CLEARED, []), (STORED, [0, 1, 9])], now_s=2.0)
    assert of.suspects() == ()
    assert matched(of, 0, 1) == {"a": 2, "b": 1}


def test_the_missing_batches_in_order_end_the_suspicion_too() -> None:
    of = index("a")
    tell(of, "a", 0, [(STORED, [0])], now_s=0.0)
    tell(of, "a", 3, [(STORED, [3])], now_s=0.0)
    for sequence in (1, 2):
        assert tell(of, "a", sequence, [(STORED, [sequence])], now_s=1.0)
        assert of.suspects() == ("a",)
    assert tell(of, "a", 3, [(STORED, [3])], now_s=1.0)
    assert of.suspects() == ()
    assert matched(of, 0, 1, 2, 3) == {"a": 4}


def test_without_a_replay_what_was_known_is_dropped_and_rebuilt() -> None:
    of = index("a")
    tell(of, "a", 0, [(STORED, [1])], now_s=0.0)
    tell(of, "a", 5, [(STORED, [5])], now_s=0.0)
    assert not tell(of, "a", 6, [(STORED, [6])], now_s=9.9)
    assert tell(of, "a", 7, [(STORED, [7])], now_s=10.0)
    assert of.suspects() == ()
    assert matched(of, 1) == {}
    assert matched(of, 7) == {"a": 1}
    assert of.counts.rebuilt == 1


def test_a_router_that_comes_late_asks_for_everything() -> None:
    of = index("a")
    assert not tell(of, "a", 57, [(STORED, [1])], now_s=0.0)
    assert of.suspects() == ("a",)


def test_a_new_incarnation_starts_at_nothing() -> None:
    """B99: the watermark belongs to the incarnation."""
    of = index("w/1")
    tell(of, "w/1", 0, [(STORED, [1])], now_s=0.0)
    of.drop("w/1")
    of.add("w/2", blocks_max=10)
    assert matched(of, 1) == {}
    assert tell(of, "w/2", 0, [(STORED, [2])], now_s=0.0)
    assert matched(of, 2) == {"w/2": 1}


def test_a_garbled_event_is_dropped_alone() -> None:
    """B105: never turned into `clear everything`."""
    of = index("a")
    tell(of, "a", 0, [(STORED, [1]), ("gibberish", [2]), (STORED, [3])], now_s=0.0)
    assert (matched(of, 1), matched(of, 3)) == ({"a": 1}, {"a": 1})
    assert of.counts.malformed == 1


def test_an_absent_block_does_not_stop_a_removal() -> None:
    """B103."""
    of = index("a")
    tell(of, "a", 0, [(STORED, [1])], now_s=0.0)
    tell(of, "a", 1, [(REMOVED, [99, 1])], now_s=0.0)
    assert matched(of, 1) == {}


def test_a_routed_prompt_counts_as_stored_for_a_short_while() -> None:
    of = index("a", "b")
    of.guess("a", [1, 2, 3], now_s=10.0)
    assert matched(of, 1, 2, 9, now_s=11.9) == {"a": 2}
    of.guess("a", [1], now_s=11.9)
    assert matched(of, 1, 2, now_s=12.1) == {"a": 1}
    assert matched(of, 1, now_s=14.0) == {}


def test_a_guess_that_came_true_stays() -> None:
    of = index("a")
    of.guess("a", [1], now_s=0.0)
    tell(of, "a", 0, [(STORED, [1])], now_s=0.5)
    assert matched(of, 1, now_s=100.0) == {"a": 1}
    tell(of, "a", 1, [(REMOVED, [1])], now_s=100.0)
    assert matched(of, 1, now_s=100.0) == {}


def test_a_worker_that_publishes_nothing_is_known_by_guesses_for_longer() -> None:
    """B102: said, and used."""
    of = index("a")
    of.guess("a", [1], now_s=0.0)
    assert not of.publishes_nothing("a", now_s=9.0)
    assert of.publishes_nothing("a", now_s=10.0)
    of.guess("a", [1], now_s=10.0)
    assert matched(of, 1, now_s=60.0) == {"a": 1}
    assert matched(of, 1, now_s=71.0) == {}
    tell(of, "a", 0, [], now_s=80.0)
    assert not of.publishes_nothing("a", now_s=90.0)


def test_a_bound_that_is_overrun_drops_the_ends_of_the_oldest() -> None:
    """B104: an engine that never tells of removals fills no memory."""
    of = index("a", blocks_max=3)
    tell(of, "a", 0, [(STORED, [1, 2, 3, 4, 5])], now_s=0.0)
    assert of.blocks_of("a") == 3
    assert matched(of, 1, 2, 3, 4, 5) == {"a": 3}
    tell(of, "a", 1, [(STORED, [6, 7])], now_s=0.0)
    assert (of.blocks_of("a"), matched(of, 1, 2), matched(of, 6, 7)) == (3, {"a": 1}, {"a": 2})
    of.guess("a", [11, 12], now_s=0.0)
    of.guess("a", [13, 14], now_s=0.0)
    assert (matched(of, 11, 12), matched(of, 13, 14)) == ({"a": 1}, {"a": 2})
    assert of.counts.overflow == 5


def test_a_snapshot_brings_another_index_to_the_same_state() -> None:
    one, other = index("a"), index("a")
    tell(one, "a", 0, [(STORED, [1, 2, 2])], now_s=0.0)
    taken = one.snapshot("a")
    assert taken is not None
    tell(other, "a", 5, [(STORED, [9])], now_s=0.0)
    assert one.snapshot("a") == (0, [("gpu", (1, 2)), ("gpu", (2,))])
    other.restore("a", *taken)
    assert other.is_suspect("a")  # 1 to 5 are still missing
    for sequence in range(1, 6):
        for of in (one, other):
            tell(of, "a", sequence, [(REMOVED, [2])], now_s=0.0)
    assert not other.is_suspect("a")
    assert matched(one, 1, 2) == matched(other, 1, 2) == {"a": 1}


def test_bits_of_the_gone_are_used_again() -> None:
    of = index()
    for round_ in range(300):
        for name in "abcd":
            of.add(f"{name}{round_}", blocks_max=10)
            tell(of, f"{name}{round_}", 0, [(STORED, [round_])], now_s=0.0)
        assert set(matched(of, round_)) == {f"{name}{round_}" for name in "abcd"}
        for name in "abcd":
            of.drop(f"{name}{round_}")
    of.add("last", blocks_max=1)
    assert of._workers["last"].has.bit.bit_length() <= 4


def check(of: PrefixIndex) -> None:
    """Chains, holders and sums agree, and nothing is kept that nobody has."""
    chains = set(of._chains.where.values())
    assert {v: c for c in chains for v in c.hashes} == of._chains.where
    assert {c.hashes[0]: c for c in chains} == of._chains.heads
    for chain in chains:
        assert chain.size == len(chain.hashes) > 0
        assert chain.whole == hash(chain.hashes)
        assert chain.full, "nobody has its end"
        assert chain.part is None or chain.part
        want = {bit: has for bit, h in of._chains.by_bit.items() if (has := h.has(chain))}
        part = chain.part or {}
        assert {bit for bit, has in want.items() if has == chain.size} == {
            1 << i for i in range(chain.full.bit_length()) if chain.full >> i & 1
        }
        assert {bit: has for bit, has in want.items() if has < chain.size} == part
    for worker in of._workers.values():
        holder = worker.has
        assert chains >= holder.held.keys() | holder.guesses.keys()
        assert holder.blocks == sum(holder.held.values()) <= worker.blocks_max
        guessed = sum(guesses[0][1] for guesses in holder.guesses.values())
        assert holder.guessed == guessed <= worker.blocks_max
        for guesses in holder.guesses.values():
            assert guesses == sorted(guesses)
            assert guesses[::-1] == sorted(guesses, key=lambda g: g[1])


class Plain:
    """What the index says, block by block: one worker's, without sequence numbers."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.guessed: dict[int, float] = {}
        self.unknown = 0

    def tell(self, kind: str, hashes: list[int], now_s: float) -> None:
        self.guessed = {h: until for h, until in self.guessed.items() if until > now_s}
        if kind == CLEARED:
            self.held, self.guessed = {}, {}
        elif kind == "guess":
            for value in dict.fromkeys(hashes):
                self.guessed.pop(value, None)
                self.guessed[value] = now_s + 2.0
        elif kind == STORED:
            for value in hashes:
                self.held[value] = self.held.get(value, 0) + 1
        else:
            for value in hashes:
                self.unknown += value not in self.held
                self.held[value] = self.held.get(value, 0) - 1
                if self.held[value] <= 0:
                    del self.held[value]

    def depth(self, prompt: list[int]) -> int:
        have = self.held.keys() | self.guessed.keys()
        return next((i for i, h in enumerate(prompt) if h not in have), len(prompt))


chains = st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 12), st.booleans()).map(
    lambda c: [100 * c[0] + i for i in range(c[1], c[2])][:: -1 if c[3] else 1]
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from([STORED, STORED, REMOVED, "guess", "guess", CLEARED]),
            st.one_of(chains, chains, blocks),
            st.floats(0.0, 1.5),
            st.sampled_from([None, -1, 0, 5, 105]),
        ),
        max_size=30,
    ),
    chains,
)
def test_chains_say_what_blocks_would_say(
    told: list[tuple[str, str, list[int], float, int | None]], prompt: list[int]
) -> None:
    of = index("a", "b")
    plain = {"a": Plain(), "b": Plain()}
    sequence, now_s = {"a": 0, "b": 0}, 0.0
    for key, kind, hashes, later_s, behind in told:
        now_s += later_s
        for one in plain.values():
            one.tell(STORED, [], now_s)
        matched(of, *prompt, now_s=now_s)  # forgets what has run out
        plain[key].tell(kind, hashes, now_s)
        if kind == "guess":
            of.guess(key, hashes, now_s=now_s)
        else:
            parent = hashes[0] - 1 if behind == -1 and hashes else behind
            events = [(kind, hashes)]
            assert tell(of, key, sequence[key], events, now_s=now_s, parent=parent)
            sequence[key] += 1
        check(of)
        for tried in (prompt, hashes):
            want = {k: depth for k, p in plain.items() if (depth := p.depth(tried))}
            assert matched(of, *tried, now_s=now_s) == want
        check(of)
    for key, one in plain.items():
        assert of.blocks_of(key) == len(one.held)
        snapshot = of.snapshot(key)
        told_blocks = sorted(h for h, count in one.held.items() for _ in range(count))
        assert snapshot is None or sorted(h for _, c in snapshot[1] for h in c) == told_blocks
    assert of.counts.unknown_removed == sum(one.unknown for one in plain.values())
    known = set().union(*(one.held.keys() | one.guessed.keys() for one in plain.values()))
    assert len(of) == len(known)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.sampled_from([STORED, STORED, REMOVED, "guess"]),
            st.one_of(chains, blocks),
            st.floats(0.0, 1.5),
        ),
        max_size=30,
    ),
    st.integers(1, 9),
)
def test_what_is_kept_of_a_worker_is_bounded_and_was_told(
    told: list[tuple[str, str, list[int], float]], blocks_max: int
) -> None:
    """B104: beyond the bound less is believed, never more."""
    of = index("a", "b", blocks_max=blocks_max)
    plain, sequence, now_s = {"a": Plain(), "b": Plain()}, {"a": 0, "b": 0}, 0.0
    for key, kind, hashes, later_s in told:
        now_s += later_s
        plain[key].tell(kind, hashes, now_s)
        if kind == "guess":
            of.guess(key, hashes, now_s=now_s)
        else:
            tell(of, key, sequence[key], [(kind, hashes)], now_s=now_s)
            sequence[key] += 1
        check(of)
        for found, depth in matched(of, *hashes, now_s=now_s).items():
            plain[found].tell(STORED, [], now_s)
            assert depth <= plain[found].depth(hashes)


def test_a_prefix_goes_on_below_the_gpu() -> None:
    of = index("a", "b")
    told = [KvEvent(STORED, (1, 2, 3)), KvEvent(STORED, (2, 3, 4, 5), None, CPU)]
    told.append(KvEvent(STORED, (6,), 5, DISK))
    assert of.apply("a", 0, told, now_s=0.0)
    tell(of, "b", 0, [(STORED, [1])], now_s=0.0)
    assert matched(of, 1, 2, 3, 4, 5, 6) == {"a": 3, "b": 1}
    assert of.tiered([1, 2, 3, 4, 5, 6]) == {"a": [(GPU, 3), (CPU, 2), (DISK, 1)]}
    of.apply("a", 1, [KvEvent("removed", (3, 2))], now_s=0.0)
    assert of.tiered([1, 2, 3, 4, 5, 6]) == {"a": [(GPU, 1), (CPU, 4), (DISK, 1)]}
    check(of)
    snapshot = of.snapshot("a")
    assert snapshot is not None
    other = index("a")
    other.restore("a", *snapshot)
    assert other.tiered([1, 2, 3, 4, 5, 6]) == of.tiered([1, 2, 3, 4, 5, 6])
    of.apply("a", 5, [KvEvent(STORED, (9,))], now_s=0.0)
    assert of.tiered([1, 2]) == {}, "a suspect is credited with nothing"
    of.drop("a")
    assert of.tiered([1, 2]) == {} and len(of) == 1
    check(of)


LOADS = {CPU: TierLoad(1e9, 0.0), DISK: TierLoad(1e8, 0.5)}


@pytest.mark.parametrize(
    ("pieces", "good"),
    [
        ([(GPU, 1000)], 1000),
        ([(GPU, 1000), (CPU, 1000)], 1900),  # loaded in 0.1 s, computed in 1 s
        ([(CPU, 1000)], 900),
        ([(GPU, 1000), (DISK, 1000)], 1000),  # 1.5 s to load: computed sooner
        ([(DISK, 1000), (GPU, 1000)], 0),  # what is behind it is of no use
        ([(CPU, 500), (GPU, 500)], 950),
        ([], 0),
    ],
)
def test_a_prefix_is_worth_its_tokens_less_their_load(
    pieces: list[tuple[str, int]], good: int
) -> None:
    found = worth(
        pieces, LOADS, kv_bytes_per_token=100_000, prefill_s=lambda tokens, _before: tokens / 1000
    )
    assert found == good


@given(st.lists(st.integers(1, 60), min_size=10, max_size=20), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_many_workers_have_parts_of_one_prompt(depths: list[int], rng: random.Random) -> None:
    """A chain is cut where it would be asked of too many parts."""
    names = [f"w{i}" for i in range(len(depths))]
    of = index(*names)
    prompt = list(range(60))
    tell(of, names[0], 0, [(STORED, prompt)], now_s=0.0)
    for name, depth in zip(names[1:], depths[1:], strict=True):
        step, parent = rng.randint(1, 20), None
        for number, start in enumerate(range(0, depth, step)):
            part = prompt[start : min(depth, start + step)]
            tell(of, name, number, [(STORED, part)], now_s=0.0, parent=parent)
            parent = part[-1]
            check(of)
    most = max(len(chain.part or ()) for chain in of._chains.where.values())
    assert most <= PARTLY_MAX + 1
    want = {names[0]: 60, **dict(zip(names[1:], depths[1:], strict=True))}
    assert matched(of, *prompt) == want
    assert matched(of, *prompt[:30], 777) == {name: min(30, d) for name, d in want.items()}
    check(of)


def test_a_prompt_longer_than_a_chain() -> None:
    of = index("a", "b", blocks_max=5_000)
    prompt = list(range(2_000))
    tell(of, "a", 0, [(STORED, prompt)], now_s=0.0)
    of.guess("b", prompt[:1_500], now_s=0.0)
    check(of)
    assert max(chain.size for chain in of._chains.where.values()) <= CHAIN_BLOCKS_MAX
    assert matched(of, *prompt) == {"a": 2_000, "b": 1_500}
    tell(of, "a", 1, [(REMOVED, prompt[:599:-1])], now_s=0.0)
    check(of)
    assert matched(of, *prompt) == {"a": 600, "b": 1_500}
    assert matched(of, *prompt, now_s=2.0) == {"a": 600}
    assert len(of) == 600
