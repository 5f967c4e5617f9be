"""The group barrier under any order, loss, doubling and restart of its ranks' reports (R17.1).

The machine keeps what really happened on the ranks; the group hears of it by messages that are
delivered late, twice, in any order, or never. Whatever it believes, it publishes only what all
ranks have really passed together.
"""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from readyplane_router.group import (
    COMMUNICATOR_FROM,
    FAILED,
    FORMING,
    PUBLISHED,
    STEPS,
    Group,
    overdue,
    publish,
    report,
)

RIGHT, WRONG = "sha256:" + "a" * 64, "sha256:" + "b" * 64
LAST = len(STEPS) - 1
STALL_S = 100.0


class Rank:
    """What one rank really does."""

    def __init__(self) -> None:
        self.life = 0
        self.at = -1
        self.with_lives: tuple[int, ...] = ()


class Barrier(RuleBasedStateMachine):
    """Ranks, a network that may do anything, and the group as the router has it."""

    @initialize(ranks=st.integers(1, 4))
    def begin(self, ranks: int) -> None:
        self.group = Group(ranks, RIGHT)
        self.ranks = [Rank() for _ in range(ranks)]
        self.epochs = 0
        self.sent: list[tuple[int, str, int, int, str]] = []
        self.now_s = 0.0
        self.passed: set[tuple[int, tuple[int, ...]]] = set()
        self.told_failure = False
        self.published: Group | None = None

    @rule(rank=st.integers(0, 3), steps=st.integers(1, 5))
    def get_on(self, rank: int, steps: int) -> None:
        """A rank passes its next steps, if it can, and reports each."""
        rank %= len(self.ranks)
        for _ in range(steps):
            self._step(rank)

    @rule(rounds=st.integers(1, 5))
    def all_get_on(self, rounds: int) -> None:
        """Every rank in turn, so that the barrier is often near."""
        for _ in range(rounds):
            for rank in range(len(self.ranks)):
                self._step(rank)

    def _step(self, rank: int) -> None:
        me, now = self.ranks[rank], tuple(other.life for other in self.ranks)
        if me.at >= COMMUNICATOR_FROM and me.with_lives != now:
            me.at = COMMUNICATOR_FROM - 1  # its communicator broke: it connects anew
        elif me.at + 1 == COMMUNICATOR_FROM:
            # A communicator needs everybody, verified and alive, at the same time.
            if all(other.at >= COMMUNICATOR_FROM - 1 for other in self.ranks):
                me.with_lives, me.at = now, COMMUNICATOR_FROM
        elif me.at < LAST:
            me.at += 1
        if me.at == LAST:
            self.passed.add((rank, me.with_lives))
        self._tell(rank)

    @rule(rank=st.integers(0, 3))
    def start_again(self, rank: int) -> None:
        rank %= len(self.ranks)
        me = self.ranks[rank]
        me.life, me.at, me.with_lives = me.life + 1, 0, ()
        self._tell(rank)

    def _tell(self, rank: int) -> None:
        me = self.ranks[rank]
        self.sent.append((rank, STEPS[max(0, me.at)], me.life, sum(me.with_lives), RIGHT))

    @rule(rank=st.integers(0, 8), wrong=st.booleans())
    def break_down(self, rank: int, wrong: bool) -> None:
        """A rank fails or loads another artifact; now and then only, or nothing else is seen."""
        if rank == 0:
            life = self.ranks[0].life
            self.sent.append((0, "verified" if wrong else FAILED, life, 0, WRONG if wrong else ""))

    @rule(at=st.integers(0, 200), again=st.booleans())
    def deliver(self, at: int, again: bool) -> None:
        """Any message, however old, in whatever order; it may come again."""
        if self.sent:
            at %= len(self.sent)
            self._deliver(self.sent[at] if again else self.sent.pop(at))

    @rule(random=st.randoms(use_true_random=False))
    def deliver_all(self, random: Random) -> None:
        """All, in any order."""
        random.shuffle(self.sent)
        for message in list(self.sent):
            self._deliver(message)

    @rule(rank=st.integers(0, 3), steps=st.integers(1, 5), random=st.randoms(use_true_random=False))
    def start_again_while_others_are_done(self, rank: int, steps: int, random: Random) -> None:
        """The hard case: what was passed with the old life is told after the new one."""
        self.all_get_on(5)
        self.start_again(rank)
        for who in range(len(self.ranks)):
            self.get_on(who, 2)  # all are in the new communicator
        self.get_on(rank, steps)
        self.deliver_all(random)

    @rule(at=st.integers(0, 200))
    def lose(self, at: int) -> None:
        """It never comes (again)."""
        if self.sent:
            self.sent.pop(at % len(self.sent))

    def _deliver(self, message: tuple[int, str, int, int, str]) -> None:
        rank, step, life, communicator, manifest = message
        self.now_s += 1.0
        told = report(
            self.group,
            rank=rank,
            step=step,
            manifest_digest=manifest,
            life=life,
            communicator=communicator,
            now_s=self.now_s,
        )
        if step == FAILED or manifest == WRONG:
            self.told_failure = True
        self.epochs += 1
        self.group = publish(told, self.epochs)
        self.nothing_partial_is_published()

    @rule(seconds=st.floats(0, 3 * STALL_S))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        before = self.group
        self.group = overdue(before, now_s=self.now_s, stall_s=STALL_S)
        if before.state != FORMING or len(self.ranks) == 1:
            assert self.group == before

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def nothing_partial_is_published(self) -> None:
        group = self.group
        if self.told_failure:
            assert group.state == FAILED
        if group.state == PUBLISHED and self.published is None:
            self.published = group
            lives = tuple(group.lives.get(r, 0) for r in range(group.ranks))
            for rank in range(group.ranks):
                assert (rank, lives) in self.passed, (rank, lives, self.passed)
        if self.published is not None:
            assert group.epoch == self.published.epoch, "an epoch never changes"

    @precondition(lambda self: hasattr(self, "group"))
    @invariant()
    def a_failed_generation_stays_failed_and_publishes_nothing(self) -> None:
        if self.group.state == FAILED:
            assert publish(self.group, 10**6) == self.group
            again = report(self.group, rank=0, step="canary_passed", manifest_digest=RIGHT)
            assert again == self.group


Barrier.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBarrier = Barrier.TestCase
