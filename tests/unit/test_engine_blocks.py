"""The KV pool in runs does what a plain pool of blocks does, eviction order included."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from readyplane_agent.engines.modelled.core_blocks import BlockPool


class Plain:
    """The pool block by block."""

    def __init__(self, total: int) -> None:
        self.total, self.private = total, 0
        self.users: dict[int, int] = {}
        self.idle: list[int] = []  # the next to go first

    def cached(self, value: int) -> bool:
        return value in self.users or value in self.idle

    def available(self) -> int:
        return self.total - self.private - len(self.users)

    def match(self, hashes: tuple[int, ...]) -> int:
        return next((i for i, h in enumerate(hashes) if not self.cached(h)), len(hashes))

    def share(self, hashes: tuple[int, ...]) -> None:
        for value in hashes:
            if value in self.idle:
                self.idle.remove(value)
            self.users[value] = self.users.get(value, 0) + 1

    def take(self, count: int) -> list[int]:
        short = max(0, count - (self.available() - len(self.idle)))
        gone, self.idle = self.idle[:short], self.idle[short:]
        self.private += count
        return gone

    def publish(self, hashes: tuple[int, ...]) -> tuple[int, ...]:
        new = tuple(value for value in hashes if not self.cached(value))
        self.users.update(dict.fromkeys(new, 1))
        self.private -= len(new)
        return new

    def give_back(self, hashes: tuple[int, ...], private: int) -> None:
        self.private -= private
        for value in hashes:
            self.users[value] -= 1
        over = [value for value in hashes if not self.users[value]]
        for value in over:
            del self.users[value]
        self.idle += reversed(over)


prompts = st.tuples(st.integers(0, 2), st.integers(1, 9), st.sampled_from([0, 3, 5])).map(
    lambda p: tuple(  # prompts of a family share their first blocks
        100 * p[0] + i + (1000 * p[2] if i >= p[2] else 0) for i in range(p[1])
    )
)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), prompts, st.booleans()), max_size=40),
    st.sampled_from([12, 25]),
)
def test_the_same_blocks_are_found_and_evicted(
    told: list[tuple[str, tuple[int, ...], bool]], total: int
) -> None:
    pool, plain = BlockPool(total), Plain(total)
    open_: dict[str, tuple[tuple[int, ...], int]] = {}
    for name, prompt, tail in told:
        if name in open_:
            blocks, private = open_.pop(name)
            pool.give_back(blocks, private)
            plain.give_back(blocks, private)
        else:
            hits = pool.match(prompt, len(prompt))
            assert hits == plain.match(prompt)
            shared, need = prompt[:hits], len(prompt) - hits + tail
            idle = pool.idle_among(shared)
            assert idle == sum(value in plain.idle for value in shared)
            if need + idle > plain.available():
                continue
            pool.share(shared)
            plain.share(shared)
            pool.take(need)
            assert pool.evicted == plain.take(need)
            pool.evicted = []
            new = pool.publish(prompt[hits:])
            assert new == plain.publish(prompt[hits:])
            open_[name] = shared + new, need - len(new)
        assert (pool.private, pool.shared) == (plain.private, len(plain.users))
        assert pool.idle == len(plain.idle)
        assert set(pool._runs.where) == plain.users.keys() | set(plain.idle)
    assert sorted(pool.clear()) == sorted(plain.idle)
    assert set(pool._runs.where) == plain.users.keys()
