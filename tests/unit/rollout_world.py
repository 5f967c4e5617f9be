"""A fleet of counted workers for the roll-out brain: they start, serve, fail and drain by ticks.

Plays census, guard and actuator at once, as plainly as can be: the guard replaces what is missing,
starts take some ticks, drains others. Every step is checked for what must never happen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from readyplane_planner import rollout
from readyplane_planner.rollout import (
    RESTING,
    Facts,
    Generation,
    Member,
    Rollout,
    Rules,
    Side,
    Stage,
    Tally,
    moves,
)
from readyplane_planner.rollout.values import Phase

OLD, NEW, THIRD = (f"sha256:{letter * 64}" for letter in "abc")
TICK_S = 1.0

FAULT = "canary: token 3 is 17, not 4"


@dataclass
class Box:
    """One worker; `left` ticks until it serves, or until it has drained."""

    worker_id: str
    digest: str
    number: int
    left: int = 0
    age: int = 0
    draining: bool = False

    @property
    def serves(self) -> bool:
        return not self.left and not self.draining


@dataclass
class Fleet:
    """Both pools and the brain over them.

    Attributes:
        start, drain: ticks. fails: artifacts whose starts fail. share: attained by artifact.
        served: requests that end a tick, over all generations. budget: GPUs, None for any.
    """

    targets: list[int]
    rules: Rules = field(default_factory=lambda: Rules(samples_min=0, verify_s=5.0))
    wanted: str = OLD
    start: int = 4
    drain: int = 6
    min_ready: int = 2
    fails: set[str] = field(default_factory=set)
    share: dict[str, float] = field(default_factory=dict)
    requests: int = 50
    idle: bool = False
    known: bool = True
    hold: bool = False
    told: bool = True
    budget: int | None = None
    now_s: float = 1000.0
    state: Rollout = field(default_factory=Rollout)
    generation: Generation = field(default_factory=Generation)
    pools: tuple[list[Box], list[Box]] = field(default_factory=lambda: ([], []))
    phases: list[Phase] = field(default_factory=list)
    numbered: int = 0
    desired: list[int] = field(default_factory=list)
    lost: list[list[str]] = field(default_factory=lambda: [[], []])
    came: list[list[str]] = field(default_factory=lambda: [[], []])
    step: rollout.Step | None = None
    turned: bool = False

    def __post_init__(self) -> None:
        self.desired = list(self.targets)

    @classmethod
    def of(cls, p: int, d: int, **options: object) -> Fleet:
        """That many old workers that serve, which is what they shall be."""
        made = cls([p, d], **options)  # type: ignore[arg-type]
        for place, count in enumerate((p, d)):
            for _ in range(count):
                made._begin(place, Generation(OLD, 1), left=0, age=100)
        return made

    def _begin(self, place: int, generation: Generation, *, left: int, age: int = 0) -> None:
        self.numbered += 1
        name = f"{'pd'[place]}{self.numbered}"
        self.pools[place].append(Box(name, generation.digest, generation.number, left, age))

    def count(self, digest: str) -> tuple[int, int]:
        """(P, D) of an artifact that serve."""
        p, d = (sum(b.digest == digest and b.serves for b in pool) for pool in self.pools)
        return p, d

    def there(self, digest: str) -> int:
        """Workers of an artifact in whatever state."""
        return sum(b.digest == digest for pool in self.pools for b in pool)

    def crash(self, place: int, digest: str) -> None:
        """One serving worker of an artifact is gone."""
        for box in self.pools[place]:
            if box.digest == digest and box.serves:
                self.pools[place].remove(box)
                return

    def run(self, ticks: int) -> Fleet:
        """So many ticks; ends early once nothing moves any more."""
        for _ in range(ticks):
            self.tick()
        return self

    def until(self, phase: Phase, within: int = 400) -> Fleet:
        """Until it is in that phase."""
        for _ in range(within):
            if self.state.phase is phase:
                return self
            self.tick()
        raise AssertionError(f"{phase} was not reached: {self.phases[-5:]} {self.state}")

    # ------------------------------------------------------------------ one tick

    def tick(self) -> None:
        """Time passes, the brain decides, it is done."""
        self.now_s += TICK_S
        self._pass_time()
        sides = (self._side(0), self._side(1))
        turn = rollout.advance(
            self.state,
            self.generation,
            sides,
            self._facts(sides),
            self.rules,
            promised=0.9,
            now_s=self.now_s,
        )
        self._check(turn.step, sides)
        self._check_rest(turn, sides)
        self.state, self.generation, self.step = turn.state, turn.generation, turn.step
        self.phases.append(turn.state.phase)
        self.turned = turn.told.turned
        self._act(turn.step, sides)

    def _pass_time(self) -> None:
        self.lost, self.came = [[], []], [[], []]
        for place, pool in enumerate(self.pools):
            for box in list(pool):
                if box.left:
                    box.left -= 1
                    if box.left:
                        continue
                    if box.draining:
                        pool.remove(box)
                    elif box.digest in self.fails:
                        pool.remove(box)
                        self.lost[place].append(box.digest)
                    else:
                        self.came[place].append(box.digest)
                elif not box.draining:
                    box.age += 1

    def _side(self, place: int) -> Side:
        ready = [{b.digest for b in pool if b.serves} for pool in self.pools]
        some_fit = bool(ready[0] & ready[1])
        members = []
        for box in self.pools[place]:
            if box.draining:
                continue
            if box.left:
                stage = Stage.COMING
            elif box.digest not in ready[1 - place] and ready[1 - place] and some_fit:
                stage = Stage.ALONE
            else:
                stage = Stage.READY if box.age >= self.min_ready else Stage.FRESH
            members.append(Member(box.worker_id, box.digest, box.number, stage))
        desired = self.desired[place]
        live = min(len(members), desired) if self._mixed() else len(members)
        shrink = min(1, max(0, live - self.targets[place]))
        self.desired[place] = desired = max(live - shrink, self.targets[place])
        goal = self.state.goal.digest
        return Side(
            members=tuple(members),
            target=desired,
            grow=min(2, max(0, desired - live)) if not self.hold else 0,
            shrink=shrink,
            leaving=tuple(b.digest for b in self.pools[place] if b.draining),
            pending_max=8,
            failed=self.lost[place].count(goal),
            came=self.came[place].count(goal),
            fault=FAULT if goal in self.lost[place] else "",
        )

    def _mixed(self) -> bool:
        return self.state.phase not in RESTING

    def _facts(self, sides: tuple[Side, Side]) -> Facts:
        room = None
        if self.budget is not None:
            held = sum(len(pool) for pool in self.pools) + sum(s.grow for s in sides)
            room = max(0, self.budget - held)
        return Facts(
            wanted=self.wanted,
            hold=self.hold,
            known=self.known,
            orders=self.known,
            idle=self.idle,
            tallies=self._tallies() if self.told else None,
            start_s=20.0,
            drain_s=20.0,
            tick_s=TICK_S,
            room_gpus=room,
        )

    def _tallies(self) -> Mapping[str, Tally]:
        if self.idle:
            return {}
        counts = {g: min(self.count(g)) for g in {b.digest for pool in self.pools for b in pool}}
        whole = sum(counts.values())
        found = {}
        for digest, count in counts.items():
            ended = round(self.requests * count / whole) if whole else 0
            found[digest] = Tally(ended, round(ended * self.share.get(digest, 1.0)))
        return found

    def _act(self, step: rollout.Step, sides: tuple[Side, Side]) -> None:
        for place, side in enumerate(sides):
            gone = {*step.retire[place]}
            if not step.owns:
                gone |= {m.worker_id for m in side.members[: side.shrink]}
            cancelled = {*step.cancel[place]}
            for box in list(self.pools[place]):
                if box.worker_id in cancelled:
                    self.pools[place].remove(box)
                elif box.worker_id in gone:
                    box.draining, box.left = True, self.drain
            for _ in range(side.grow):
                self._begin(place, step.grow, left=self.start)
            for _ in range(step.surge[place]):
                self._begin(place, step.goal, left=self.start)

    def _check_rest(self, turn: rollout.Turn, sides: tuple[Side, Side]) -> None:
        """The short way through a tick at rest is the same as the long one."""
        there = [m.digest for side in sides for m in side.members]
        if self.hold or not rollout.quiet(
            self.state, self.generation, there, self.wanted, self.rules
        ):
            return
        serving = moves.serving(sides, self.generation.digest).get(self.generation.digest, [0, 0])
        short = rollout.rest(
            self.state,
            self.generation,
            self._facts(sides).tallies,
            self.rules,
            serving=(serving[0], serving[1]),
            now_s=self.now_s,
        )
        assert short.step == turn.step
        assert short.generation == turn.generation
        assert replace(short.state, ticked_s=None) == replace(turn.state, ticked_s=None)
        told = replace(turn.told, new=short.told.new, old=short.told.old, leaving=0)
        assert told == short.told

    def _check(self, step: rollout.Step, sides: tuple[Side, Side]) -> None:
        """What must hold whatever is decided."""
        goal = step.grow.digest
        known = [{m.worker_id: m for m in side.members} for side in sides]
        kept = (_without(sides[0], step.retire[0]), _without(sides[1], step.retire[1]))
        for place, side in enumerate(sides):
            assert set(step.retire[place]) <= set(known[place]), "retires who is not there"
            live = len(side.members) + side.grow
            generations = len({m.digest for s in sides for m in s.members} | {step.goal.digest})
            most = max(side.target + self.rules.surge + max(0, generations - 2), live)
            assert live + step.surge[place] <= most, "more beside the others than the surge"
        for serving in (step.goal.digest, goal):
            before, after = (moves.serving(x, serving) for x in (sides, kept))
            if serving == step.goal.digest or self.state.phase is Phase.PAUSED:
                least = min(1.0, moves.served(before, sides))
                if any(step.retire):
                    assert moves.served(after, kept) >= least - 1e-9, "capacity was given away"
        fine = moves.serving(sides, "")
        left = moves.serving(kept, "")
        for digest, count in left.items():
            was = fine[digest]
            if all(was) and any(step.retire):
                assert all(count) or not any(count), f"half a pair of {digest[:8]} is left"
        if self.budget is not None and any(step.surge):
            held = sum(len(pool) for pool in self.pools)
            assert held + sum(step.surge) + sum(s.grow for s in sides) <= self.budget


def _without(side: Side, gone: tuple[str, ...]) -> Side:
    """The pool without some."""
    return replace(side, members=tuple(m for m in side.members if m.worker_id not in gone))
