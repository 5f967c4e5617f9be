"""What may happen to the routers' store, by hand: away, restarted empty or older, answers lost."""

import copy
from typing import Any

from readyplane.core.errors import Unavailable
from readyplane.kit.clock import Clock
from readyplane_router.store import MemoryStore


class FaultyStore:
    """A memory store of several routers that a test takes away and brings back.

    Attributes:
        away: nothing is done. answers_lost: so many calls are done and never answered.
        inner: what is there now.
    """

    shared = True

    def __init__(self, clock: Clock) -> None:
        self.inner = MemoryStore(clock, shared=True, name="life 0")
        self.away = False
        self.answers_lost = 0
        self._clock = clock
        self._lives = 0
        self._kept: Any = {}

    def __getattr__(self, name: str) -> Any:
        if name == "watch":
            return self.inner.watch

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.away:
                raise Unavailable("the store does not answer", "start it")
            answer = await getattr(self.inner, name)(*args, **kwargs)
            if self.answers_lost > 0:
                self.answers_lost -= 1
                raise Unavailable("the answer was lost", "ask again")
            return answer

        return call

    def remember(self) -> None:
        """What the store would come back with: its last write to disk."""
        self._kept = copy.deepcopy(self.inner._models)

    def restart(self, *, empty: bool) -> None:
        """Another life, with nothing or with what was remembered last."""
        self._lives += 1
        self.inner = MemoryStore(self._clock, shared=True, name=f"life {self._lives}")
        if not empty:
            self.inner._models = copy.deepcopy(self._kept)
