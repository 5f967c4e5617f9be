"""Blocks in chains, and how far down each chain each holder has them.

Owns which chain a block belongs to. A chain is what a radix tree has between two forks: blocks that
followed each other, of which a holder has all, or those up to some place. Engines store a prompt
from its front and forget it from its end, step by step, so both only move that place; a chain is
cut where prompts part, or where somebody lacks blocks in its middle. Any hashes may be given, in any
order: nothing rests on their being chained, except speed.

Whole chains are compared by one hash over their block hashes (61 bits of it: as good as those), for
to compare equal numbers that are not the same objects reads memory all over the place.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

CHAIN_BLOCKS_MAX = 512
MASKS_MAX = 8_192
PARTLY_MAX = 8
"""Holders that have a part of a chain, before it is cut there: each costs a step of every lookup."""


class Chain:
    """Blocks in order.

    Attributes:
        whole: hash over all of them. full: bits of those who have them all.
        part: bit of each holder that has the first ones only, and how many; None when nobody.
    """

    __slots__ = ("full", "hashes", "part", "size", "whole")

    def __init__(self, hashes: tuple[int, ...] = ()) -> None:
        self.full = 0
        self.part: dict[int, int] | None = None
        self.become(hashes)

    def become(self, hashes: tuple[int, ...]) -> None:
        """Have these blocks from now on."""
        self.hashes = hashes
        self.size = len(hashes)
        self.whole = hash(hashes)


@dataclass(slots=True, eq=False)
class Holder:
    """What one holder has.

    Attributes:
        held: how many blocks of a chain, from its front, events told of; the oldest chain first.
        blocks: their sum. extra: how many times more than once a block is stored (B101).
        guesses: by chain, until when how many of its blocks are guessed to be there: the longest
            first, which is the one that ends first. guessed: sum of the longest.
    """

    bit: int
    held: dict[Chain, int] = field(default_factory=dict)
    blocks: int = 0
    extra: dict[int, int] = field(default_factory=dict)
    guesses: dict[Chain, list[tuple[float, int]]] = field(default_factory=dict)
    guessed: int = 0

    def has(self, chain: Chain) -> int:
        """Blocks of a chain from its front, held or guessed."""
        held = self.held.get(chain, 0)
        guesses = self.guesses.get(chain)
        return max(held, guesses[0][1]) if guesses else held


class Chains:
    """Every known block is in exactly one chain, and at least one holder has it.

    Attributes:
        where: the chain of each block. heads: the chain that begins with a block; small, and so at
            hand in the processor, where the other is not. due: when guesses run out, as a heap.
    """

    def __init__(self) -> None:
        """Empty."""
        self.where: dict[int, Chain] = {}
        self.heads: dict[int, Chain] = {}
        self.by_bit: dict[int, Holder] = {}
        self.due: list[tuple[float, int, Holder, Chain]] = []
        self._pushed = 0
        self._masks: dict[int, int] = {}

    # ------------------------------------------------------------------------ finding

    def found(self, chain: Chain, hashes: tuple[int, ...], at: int) -> tuple[Chain, int]:
        """How many blocks of a chain are those from `at`, of which it has the first.

        Cut first where the prompt enters or leaves it, so that the next such prompt is found at
        once; returns the chain that begins there.
        """
        own = chain.hashes
        place = 0 if own[0] == hashes[at] else own.index(hashes[at])
        count = alike(own, place, hashes, at)
        if at + count < len(hashes) and place + count < chain.size:
            chain = self.split(chain, place + count)[0]
        if place:
            chain = self.split(chain, place)[1]
        return chain, count

    # ------------------------------------------------------------------------ events

    def store(self, holder: Holder, blocks: tuple[int, ...], parent: int | None) -> None:
        """Blocks that a holder stored, behind `parent` where that is known."""
        where, held = self.where, holder.held
        at, end = 0, len(blocks)
        chain, before, edge = None, None, 0  # of the block before, and its place there plus one
        while at < end:
            chain = where.get(blocks[at])
            if chain is None:
                if parent is not None and not at:
                    before, edge = self._behind(parent, blocks)
                chain, count = self._grow(holder, blocks, at, before, edge)
                place = held.get(chain, 0)
                self._hold(holder, chain, place + count)
            else:
                had, own = held.get(chain, 0), chain.hashes
                if had < chain.size and own[had] == blocks[at]:
                    place = had
                else:
                    place = 0 if own[0] == blocks[at] else own.index(blocks[at])
                count = alike(own, place, blocks, at)
                if place > had:  # it lacks what is before
                    chain, place, had = self.split(chain, place)[1], 0, 0
                again = min(count, had - place)
                for value in blocks[at : at + again] if again > 0 else ():
                    holder.extra[value] = holder.extra.get(value, 0) + 1
                if place + count > had:
                    self._hold(holder, chain, place + count)
            before, edge = chain, place + count
            at += count
        if chain is not None and chain.part is not None and len(chain.part) > PARTLY_MAX:
            self.split(chain, chain.part.get(holder.bit) or min(chain.part.values()))

    def _behind(self, parent: int, blocks: tuple[int, ...]) -> tuple[Chain | None, int]:
        """The chain of the block before, if it is known and not one of these (B105)."""
        chain = self.where.get(parent)
        if chain is None or parent in blocks:
            return None, 0
        own = chain.hashes
        return chain, chain.size if own[-1] == parent else own.index(parent) + 1

    def remove(self, holder: Holder, blocks: tuple[int, ...]) -> int:
        """Blocks that a holder removed, in any order; returns how many of them it did not have."""
        if holder.extra:
            blocks = self._less(holder, blocks)
        where, held = self.where, holder.held
        at, end, unknown = 0, len(blocks), 0
        while at < end:
            chain = where.get(blocks[at])
            had = 0 if chain is None else held.get(chain, 0)
            own: tuple[int, ...] = ()
            place = -1
            if chain is not None and had:
                own = chain.hashes
                if own[had - 1] == blocks[at]:  # its last one, and then backwards
                    count = _alike_back(own, had, blocks, at)
                    self._hold(holder, chain, had - count)
                    at += count
                    continue
                place = own.index(blocks[at])
            if chain is None or not 0 <= place < had:
                unknown += 1
                at += 1
                continue
            count = min(alike(own, place, blocks, at), had - place)
            if place + count < had:
                chain = self.split(chain, place + count)[0]
            self._hold(holder, chain, place)
            at += count
        return unknown

    def clear(self, holder: Holder) -> None:
        """All that a holder has, and is guessed to have, is gone."""
        chains = dict.fromkeys(holder.held) | dict.fromkeys(holder.guesses)
        holder.held, holder.guesses, holder.extra = {}, {}, {}
        holder.blocks = holder.guessed = 0
        for chain in chains:
            self._mark(holder, chain)

    def shorten(self, holder: Holder, over: int) -> None:
        """Forget `over` blocks that a holder holds: the ends of its oldest chains."""
        while over > 0:
            chain, had = next(iter(holder.held.items()))
            count = min(over, had)
            for value in chain.hashes[had - count : had] if holder.extra else ():
                holder.extra.pop(value, None)
            self._hold(holder, chain, had - count)
            over -= count

    # ------------------------------------------------------------------------ guesses

    def guess(self, holder: Holder, blocks: tuple[int, ...], until_s: float) -> None:
        """Count blocks as there until then."""
        where = self.where
        at, end = 0, len(blocks)
        before, edge = None, 0
        while at < end:
            chain = where.get(blocks[at])
            if chain is None:
                if before is not None and edge < before.size:
                    self.split(before, edge)
                chain, count = self._grow(holder, blocks, at, None, 0)
            else:
                own = chain.hashes
                if own[0] != blocks[at]:
                    chain = self.split(chain, own.index(blocks[at]))[1]
                count = alike(chain.hashes, 0, blocks, at)
            self._guess(holder, chain, until_s, count)
            before, edge = chain, count
            at += count

    def unguess(self, holder: Holder, over: int) -> None:
        """Drop `over` guessed blocks: the ends of its oldest guesses."""
        while over > 0:
            chain, guesses = next(iter(holder.guesses.items()))
            longest = guesses[0][1]
            count = min(over, longest)
            left = [(until_s, min(size, longest - count)) for until_s, size in guesses]
            self._guessed(holder, chain, left)
            over -= count

    def forget(self, now_s: float) -> None:
        """Drop guesses that have run out."""
        due = self.due
        while due and due[0][0] <= now_s:
            _until_s, _number, holder, chain = heapq.heappop(due)
            guesses = holder.guesses.get(chain)
            if guesses is not None:
                self._guessed(holder, chain, [g for g in guesses if g[0] > now_s])

    def _guess(self, holder: Holder, chain: Chain, until_s: float, count: int) -> None:
        had = holder.guesses.pop(chain, None)  # to the end: the oldest is dropped first
        if had is None:
            holder.guesses[chain] = [(until_s, count)]
            holder.guessed += count
            self._mark(holder, chain)
        else:
            holder.guessed -= had[0][1]
            self._guessed(holder, chain, [*had, (until_s, count)], known=False)
        self._push(holder, chain, until_s)

    def _guessed(
        self, holder: Holder, chain: Chain, guesses: list[tuple[float, int]], *, known: bool = True
    ) -> None:
        """Keep of these the ones that no other outlasts at the same length."""
        if known:
            holder.guessed -= holder.guesses[chain][0][1]
        kept: list[tuple[float, int]] = []
        longest = 0
        for until_s, size in sorted(guesses, reverse=True):  # who lasts longest first
            if size > longest:
                kept.append((until_s, size))
                longest = size
        if kept:
            holder.guesses[chain] = kept[::-1]
            holder.guessed += longest
        else:
            holder.guesses.pop(chain, None)
        self._mark(holder, chain)

    def _push(self, holder: Holder, chain: Chain, until_s: float) -> None:
        self._pushed += 1
        heapq.heappush(self.due, (until_s, self._pushed, holder, chain))

    # ------------------------------------------------------------------------ chains

    def _grow(
        self, holder: Holder, blocks: tuple[int, ...], at: int, before: Chain | None, edge: int
    ) -> tuple[Chain, int]:
        """Unknown blocks from `at` on: at the end of `before` where only this holder has that.

        Returns their chain and how many they are.
        """
        chain = None
        if before is not None:
            if edge < before.size:
                self.split(before, edge)  # prompts part here
            elif (
                before.full == holder.bit
                and not before.part
                and holder.held.get(before) == before.size
                and before.size < CHAIN_BLOCKS_MAX
            ):
                chain = before
        own: tuple[int, ...] = ()
        if chain is None:
            chain = self.heads[blocks[at]] = Chain()
        else:
            own = chain.hashes
        where, first = self.where, at
        for value in blocks[at : at + CHAIN_BLOCKS_MAX - len(own)]:
            if value in where:  # known before, or given twice
                break
            where[value] = chain
            at += 1
        chain.become(own + blocks[first:at])
        return chain, at - first

    def _hold(self, holder: Holder, chain: Chain, count: int) -> None:
        held = holder.held
        holder.blocks += count - held.get(chain, 0)
        if count:
            held[chain] = count
        else:
            del held[chain]
        self._note(holder, chain)
        if not chain.full:
            self._trim(chain)

    def _mark(self, holder: Holder, chain: Chain) -> None:
        """Note on the chain how much of it a holder has; what nobody has any more is forgotten."""
        self._note(holder, chain)
        if not chain.full:
            self._trim(chain)

    def _note(self, holder: Holder, chain: Chain) -> None:
        count, bit, part = holder.held.get(chain, 0), holder.bit, chain.part
        if holder.guesses:
            count = holder.has(chain)
        whole = count >= chain.size
        full = chain.full | bit if whole else chain.full & ~bit
        if full != chain.full:
            # Chains of one prompt have the same holders: one number for them all is at hand in the
            # processor when it is looked at again.
            if len(self._masks) >= MASKS_MAX:
                self._masks.clear()
            chain.full = self._masks.setdefault(full, full)
        if count and not whole:
            if part is None:
                part = chain.part = {}
            part[bit] = count
        elif part is not None and bit in part:
            del part[bit]
            if not part:
                chain.part = None

    def _trim(self, chain: Chain) -> None:
        where, part = self.where, chain.part
        longest = max(part.values()) if part else 0
        if not longest:
            del self.heads[chain.hashes[0]]
        for value in chain.hashes[longest:]:
            del where[value]
        chain.become(chain.hashes[:longest])
        if part:
            for bit in [bit for bit, count in part.items() if count == longest]:
                chain.full |= bit
                del part[bit]
            chain.part = part or None

    def split(self, chain: Chain, at: int) -> tuple[Chain, Chain]:
        """Cut a chain before its block `at`; returns both parts, one of them the chain itself."""
        head, tail = chain.hashes[:at], chain.hashes[at:]
        later = len(tail) <= len(head)  # the new one is the smaller: its blocks are looked at
        new = Chain(tail if later else head)
        for value in new.hashes:
            self.where[value] = new
        chain.become(head if later else tail)
        first, second = (chain, new) if later else (new, chain)
        self.heads[head[0]], self.heads[tail[0]] = first, second
        left, part = chain.full, chain.part or {}
        chain.full, chain.part = 0, None
        for bit in part:
            left |= bit
        while left:
            bit = left & -left
            left ^= bit
            holder = self.by_bit[bit]
            self._share(holder, chain, first, second, at)
            self._note(holder, first)
            self._note(holder, second)
        return first, second

    def _share(self, holder: Holder, chain: Chain, first: Chain, second: Chain, at: int) -> None:
        """What a holder had of a chain, it has of its parts."""
        had = holder.held.get(chain, 0)
        for part, count in ((first, min(had, at)), (second, max(0, had - at))):
            if count:
                holder.held[part] = count
            elif part is chain:
                holder.held.pop(part, None)
        guesses = holder.guesses.get(chain)
        if guesses is None:
            return
        beyond = [(until_s, size - at) for until_s, size in guesses if size > at]
        within = [g for g in guesses if g[1] <= at]
        if beyond and (not within or within[0][1] < at):
            within.insert(0, (beyond[-1][0], at))  # the one of them that lasts longest
        for part, own in ((first, within), (second, beyond)):
            if own:
                holder.guesses[part] = own
            elif part is chain:
                del holder.guesses[part]
            for until_s, _size in own if part is not chain else ():
                self._push(holder, part, until_s)

    @staticmethod
    def _less(holder: Holder, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Count removals of blocks that are stored more than once; the others are left."""
        extra, left = holder.extra, []
        for value in blocks:
            more = extra.get(value, 0)
            if more > 1:
                extra[value] = more - 1
            elif more:
                del extra[value]
            else:
                left.append(value)
        return tuple(left)


def alike(own: tuple[int, ...], place: int, hashes: tuple[int, ...], at: int) -> int:
    """How many blocks of `own` from `place` are those of `hashes` from `at`; one is known to be."""
    most = min(len(own) - place, len(hashes) - at)
    if own[place : place + most] == hashes[at : at + most]:
        return most
    least = 1  # so many are alike, and fewer than `most`
    while most - least > 1:
        middle = (least + most) // 2
        if own[place + least : place + middle] == hashes[at + least : at + middle]:
            least = middle
        else:
            most = middle
    return least


def _alike_back(own: tuple[int, ...], end: int, hashes: tuple[int, ...], at: int) -> int:
    """How many blocks of `own` before `end`, backwards, are those of `hashes` from `at`."""
    most = min(end, len(hashes) - at)
    return alike(own[end - most : end][::-1], 0, hashes, at)
