"""The leadership lease in Redis: SET NX PX, and compare-then-act in one script.

Expiry is judged by the store's clock alone (B152); a holder never deletes another's lease (B145).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from readyplane.kit.redis import redis_errors

if TYPE_CHECKING:
    from redis.asyncio import Redis

TAKE = """
local held = redis.call('GET', KEYS[1])
if held == false then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  return 1
end
if held == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
return 0
"""
GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class RedisLeaseStore:
    """See LeaseStore."""

    def __init__(self, client: Redis) -> None:
        self._take = client.register_script(TAKE)
        self._give_up = client.register_script(GIVE_UP)
        self._client = client

    async def take(self, name: str, holder: str, ttl_s: float) -> bool:
        """See LeaseStore."""
        with redis_errors():
            return bool(await self._take(keys=[_key(name)], args=[holder, round(ttl_s * 1000)]))

    async def give_up(self, name: str, holder: str) -> bool:
        """See LeaseStore."""
        with redis_errors():
            return bool(await self._give_up(keys=[_key(name)], args=[holder]))

    async def holder(self, name: str) -> str:
        """See LeaseStore."""
        with redis_errors():
            found = await self._client.get(_key(name))
        return found.decode() if isinstance(found, bytes) else str(found or "")

    async def left_s(self, name: str) -> float:
        """See LeaseStore."""
        with redis_errors():
            left_ms = await self._client.pttl(_key(name))
        return max(0, int(left_ms)) / 1000.0


def _key(name: str) -> str:
    return f"readyplane/planner/leader/{{{name}}}"
