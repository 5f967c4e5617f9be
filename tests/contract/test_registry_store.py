"""What every implementation of the registry's stores promises, on memory, Postgres and Redis."""

import asyncio
import os
import random
from collections.abc import AsyncIterator

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError

from readyplane.core.errors import Conflict, IdentityMismatch, NotFound, Overloaded, StaleEpoch
from readyplane.core.identity import Manifest, canonical
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane.kit.database import async_engine, migrate
from readyplane.kit.redis import connect
from readyplane.ports import Source, Transfer
from readyplane_registry.live import LiveStore, MemoryLive, Place, Report
from readyplane_registry.postgres import PostgresCatalog
from readyplane_registry.redis import RedisLive
from readyplane_registry.store import CatalogStore, ManifestRecord, MemoryCatalog, record_of
from tests.registry_data import document

WEIGHT = 0.3
MEBI = 1024 * 1024


def record(model: str = "demo") -> ManifestRecord:
    """A manifest that no other test of the module stores."""
    manifest = Manifest.from_document(document(model, salt=os.urandom(8).hex()))
    return record_of(manifest, canonical(manifest.document()), now_s=1_700_000_000.5)


# ----------------------------------------------------------------------------- manifests and tags


@pytest.fixture(params=["memory", "postgres"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[CatalogStore]:
    if request.param == "memory":
        yield MemoryCatalog()
        return
    url = request.getfixturevalue("database_url")
    await migrate(url, "readyplane_registry")
    engine = async_engine(url)
    yield PostgresCatalog(engine)
    await engine.dispose()


async def test_a_manifest_is_stored_once_and_read_back_byte_for_byte(store: CatalogStore) -> None:
    mine = record()
    stored, created = await store.put_manifest(mine)
    again, created_again = await store.put_manifest(mine)
    assert (created, created_again) == (True, False)
    assert stored == again == await store.get_manifest(mine.digest)
    assert stored.document == mine.document
    assert stored.manifest.digest == mine.digest
    assert stored.created_s == mine.created_s
    assert await store.get_manifest("sha256:" + "0" * 64) is None
    many = await store.get_manifests([mine.digest, "sha256:" + "0" * 64])
    assert many == {mine.digest: stored} and await store.get_manifests([]) == {}


async def test_fifty_identical_publications_make_one_row(store: CatalogStore) -> None:
    """B113: an insert that finds the row must not look like nothing."""
    mine = record("b113")
    answers = await asyncio.gather(*(store.put_manifest(mine) for _ in range(50)))
    assert sum(created for _record, created in answers) == 1
    assert len({stored for stored, _created in answers}) == 1
    assert len(await store.list_manifests(model="b113")) == 1


async def test_lists_are_newest_first_in_pages_without_documents(store: CatalogStore) -> None:
    mine = [record("pages") for _ in range(5)]
    for one in mine:
        await store.put_manifest(one)
    first = await store.list_manifests(model="pages", limit=3)
    rest = await store.list_manifests(model="pages", limit=3, before=first[-1].sequence)
    assert [r.digest for r in first + rest] == [r.digest for r in reversed(mine)]
    assert all(r.document == b"" for r in first)
    assert await store.list_manifests(model="pages", kind="compile") == []


async def test_a_tag_moves_by_compare_and_set_and_keeps_its_history(store: CatalogStore) -> None:
    a, b = record(), record()
    await store.put_manifest(a)
    await store.put_manifest(b)
    name = "prod/" + os.urandom(4).hex()
    first = await store.set_tag(name, a.digest, expected_digest="", force=False, now_s=1.0)
    same = await store.set_tag(name, a.digest, expected_digest="", force=False, now_s=2.0)
    assert first == same and first.version == 1
    for wrong in ("", b.digest, "sha256:" + "1" * 64):
        with pytest.raises(Conflict) as caught:
            await store.set_tag(name, b.digest, expected_digest=wrong, force=False, now_s=3.0)
        assert caught.value.found == a.digest
    moved = await store.set_tag(name, b.digest, expected_digest=a.digest, force=False, now_s=4.0)
    back = await store.set_tag(name, a.digest, expected_digest="", force=True, now_s=5.0)
    assert [moved.version, back.version] == [2, 3]
    assert [t.digest for t in await store.tag_history(name)] == [a.digest, b.digest, a.digest]
    assert await store.get_tag(name) == back
    assert (await store.list_tags())[0] == back
    assert (await store.tags_of([a.digest, b.digest])).get(a.digest) == (name,)
    assert await store.tags_of([]) == {}


async def test_a_tag_is_taken_away_by_compare_and_set_and_its_history_stays(
    store: CatalogStore,
) -> None:
    mine, other = record(), record()
    for one in (mine, other):
        await store.put_manifest(one)
    name = "gone/" + os.urandom(4).hex()
    with pytest.raises(NotFound):
        await store.remove_tag(name, expected_digest="", force=True, now_s=1.0)
    await store.set_tag(name, mine.digest, expected_digest="", force=False, now_s=1.0)
    for wrong in ("", other.digest):
        with pytest.raises(Conflict) as caught:
            await store.remove_tag(name, expected_digest=wrong, force=False, now_s=2.0)
        assert caught.value.found == mine.digest
    gone = await store.remove_tag(name, expected_digest=mine.digest, force=False, now_s=3.0)
    assert (gone.digest, gone.version, gone.created_s) == ("", 2, 3.0)
    again = await store.remove_tag(name, expected_digest=mine.digest, force=False, now_s=4.0)
    assert again == gone, "the same answer, and no other version"
    assert await store.get_tag(name) is None
    assert name not in [t.name for t in await store.list_tags()]
    assert mine.digest not in await store.tags_of([mine.digest])
    with pytest.raises(Conflict) as caught:
        await store.set_tag(name, other.digest, expected_digest=mine.digest, force=False, now_s=5.0)
    assert caught.value.found == "no such tag"
    back = await store.set_tag(name, other.digest, expected_digest="", force=False, now_s=6.0)
    assert back.version == 3 and await store.get_tag(name) == back
    told = [(t.digest, t.version) for t in await store.tag_history(name)]
    assert told == [(other.digest, 3), ("", 2), (mine.digest, 1)]


async def test_of_a_removal_and_a_move_at_once_exactly_one_wins(store: CatalogStore) -> None:
    mine, other = record(), record()
    for one in (mine, other):
        await store.put_manifest(one)
    for _round in range(6):
        name = "either/" + os.urandom(4).hex()
        await store.set_tag(name, mine.digest, expected_digest="", force=False, now_s=1.0)
        at_once = (
            store.remove_tag(name, expected_digest=mine.digest, force=False, now_s=2.0),
            store.set_tag(name, other.digest, expected_digest=mine.digest, force=False, now_s=2.0),
        )
        answers = await asyncio.gather(*at_once, return_exceptions=True)
        assert sum(isinstance(a, Conflict) for a in answers) == 1, answers
        assert [t.version for t in await store.tag_history(name)] == [2, 1]


async def test_a_tag_needs_its_manifest_and_an_expected_digest_its_tag(store: CatalogStore) -> None:
    unknown = "sha256:" + "2" * 64
    with pytest.raises(NotFound):
        await store.set_tag("x", unknown, expected_digest="", force=True, now_s=1.0)
    mine = record()
    await store.put_manifest(mine)
    with pytest.raises(Conflict) as caught:
        await store.set_tag("y", mine.digest, expected_digest=unknown, force=False, now_s=1.0)
    assert caught.value.found == "no such tag"
    assert await store.get_tag("y") is None and await store.tag_history("y") == []


async def test_of_many_writers_of_one_tag_exactly_one_wins_each_round(store: CatalogStore) -> None:
    mine = [record() for _ in range(8)]
    for one in mine:
        await store.put_manifest(one)
    name, held = "race/" + os.urandom(4).hex(), ""
    rng = random.Random(7)
    for _round in range(12):
        runners = rng.sample([r.digest for r in mine if r.digest != held], 6)
        answers = await asyncio.gather(
            *(
                store.set_tag(name, digest, expected_digest=held, force=False, now_s=1.0)
                for digest in runners
            ),
            return_exceptions=True,
        )
        won = [a for a in answers if not isinstance(a, BaseException)]
        assert len(won) == 1, answers
        assert all(isinstance(a, Conflict) for a in answers if a is not won[0])
        assert all(a.found == won[0].digest for a in answers if isinstance(a, Conflict))
        held = won[0].digest
    history = await store.tag_history(name)
    assert [tag.version for tag in history] == list(range(12, 0, -1))
    assert history[0].digest == held


async def test_the_database_itself_refuses_what_no_program_may_do(database_url: str) -> None:
    await migrate(database_url, "readyplane_registry")
    engine = async_engine(database_url)
    store = PostgresCatalog(engine)
    mine, other = record(), record()
    await store.put_manifest(mine)
    await store.put_manifest(other)
    await store.set_tag("rule", mine.digest, expected_digest="", force=False, now_s=1.0)
    columns = "digest, document, kind, model, size_bytes, file_count, tensor_count, create_time"
    values = f"'sha256:{'3' * 64}', 'not that'::bytea, 'weights', 'x', 1, 1, 1, now()"
    forbidden = [
        f"UPDATE manifests SET model = 'x' WHERE digest = '{mine.digest}'",
        f"DELETE FROM manifests WHERE digest = '{other.digest}'",
        "TRUNCATE manifests CASCADE",
        "UPDATE tag_history SET digest = digest",
        "DELETE FROM tag_history",
        "DELETE FROM tags",
        "TRUNCATE tags",
        "UPDATE tags SET version = version + 2",
        "UPDATE tags SET name = 'other', version = version + 1",
        f"INSERT INTO manifests ({columns}) VALUES ({values})",
    ]
    try:
        for statement in forbidden:
            with pytest.raises((DBAPIError, IntegrityError)) as caught:
                async with engine.begin() as connection:
                    await connection.execute(text(statement))
            told = str(caught.value)
            assert "refused" in told or "may only move" in told or "digest_is_content" in told, told
        assert (await store.get_manifest(mine.digest)) is not None
        assert [t.version for t in await store.tag_history("rule")] == [1]
    finally:
        await engine.dispose()


# ------------------------------------------------------------------------------------------- live


@pytest.fixture(params=["memory", "redis"])
async def live(request: pytest.FixtureRequest) -> AsyncIterator[LiveStore]:
    if request.param == "memory":
        yield MemoryLive(SystemClock(), weight=WEIGHT)
        return
    client = connect(request.getfixturevalue("redis_url"))
    await client.flushall()
    yield RedisLive(client, weight=WEIGHT)
    await client.aclose()


DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


def source(name: str = "w1", **fields: object) -> Source:
    values: dict[str, object] = {
        "source_id": name,
        "digest": DIGEST,
        "tier": WeightTier.L1_HOST,
        "url": f"http://127.0.0.1:9/{name}",
        "worker_id": name,
        "incarnation": f"{name}-life-1",
        "node": "n1",
        "readers_max": 2,
    }
    return Source(**(values | fields))  # type: ignore[arg-type]


def place(name: str = "w1", reader: str = "r1", request: str = "q1", **fields: object) -> Place:
    values: dict[str, object] = {
        "source_id": name,
        "digest": DIGEST,
        "worker_id": reader,
        "incarnation": f"{reader}-life-1",
        "request_id": request,
        "transfer_id": os.urandom(6).hex(),
        "ttl_s": 30.0,
    }
    return Place(**(values | fields))  # type: ignore[arg-type]


async def test_an_announced_source_is_seen_with_its_readers(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    await live.announce(source("w2", digest=OTHER), ttl_s=30)
    await live.acquire(place())
    (held,) = await live.sources(DIGEST)
    assert held.source == source(readers=1) and held.readers == 1
    assert 29 < held.expires_in_s <= 30 and 0 <= held.announced_ago_s < 1
    assert held.barred == "" and held.measured.samples == 0
    assert await live.count() == (2, 1)


async def test_an_announcement_expires_by_the_stores_clock(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=0.15)
    await asyncio.sleep(0.25)
    (held,) = await live.sources(DIGEST)
    assert held.expires_in_s <= 0, "shown with the reason, not offered"
    assert await live.count() == (0, 0)
    with pytest.raises(NotFound):
        await live.acquire(place())
    await live.announce(source(), ttl_s=30)
    assert (await live.acquire(place())).ttl_s == 30


async def test_readers_are_bounded_and_a_released_place_is_free(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    first = await live.acquire(place(reader="r1", ttl_s=10.0))
    await live.acquire(place(reader="r2"))
    with pytest.raises(Overloaded) as caught:
        await live.acquire(place(reader="r3"))
    assert 9 < (caught.value.retry_after_s or 0) <= 10, "when the first place runs out"
    released = await live.release(first.transfer_id, Report(0, 0.0))
    assert released is not None and released.first and released.held
    await live.acquire(place(reader="r3"))


async def test_of_fifty_readers_only_as_many_get_in_as_there_are_places(live: LiveStore) -> None:
    await live.announce(source(readers_max=3), ttl_s=30)
    answers = await asyncio.gather(
        *(live.acquire(place(reader=f"r{i}")) for i in range(50)), return_exceptions=True
    )
    assert sum(not isinstance(a, BaseException) for a in answers) == 3
    assert all(isinstance(a, Overloaded) for a in answers if isinstance(a, BaseException))
    assert await live.readers("w1") == 3


async def test_the_same_request_renews_its_place(live: LiveStore) -> None:
    await live.announce(source(readers_max=1), ttl_s=30)
    first = await live.acquire(place(ttl_s=0.4))
    await asyncio.sleep(0.2)
    renewed = await live.acquire(place(ttl_s=0.4))
    assert renewed.transfer_id == first.transfer_id
    await asyncio.sleep(0.3)
    with pytest.raises(Overloaded):
        await live.acquire(place(reader="r2"))


async def test_b145_a_lost_place_is_another_ones_and_cannot_be_given_back(live: LiveStore) -> None:
    """B145: A expires, B acquires, A releases or renews: B is unaffected."""
    await live.announce(source(readers_max=1), ttl_s=30)
    a = await live.acquire(place(reader="a", ttl_s=0.1))
    await asyncio.sleep(0.2)
    await live.acquire(place(reader="b"))
    late = await live.release(a.transfer_id, Report(0, 0.0))
    assert late is not None and late.first and not late.held
    assert await live.readers("w1") == 1
    with pytest.raises(Overloaded):
        await live.acquire(place(reader="a"))


async def test_a_place_taken_anew_after_it_was_lost_has_a_new_name(live: LiveStore) -> None:
    await live.announce(source(readers_max=1), ttl_s=30)
    first = await live.acquire(place(ttl_s=0.1))
    await asyncio.sleep(0.2)
    second = await live.acquire(place())
    assert second.transfer_id != first.transfer_id, "the reader sees that it had lost it"


async def test_a_release_counts_once(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    taken = await live.acquire(place())
    report = Report(64 * MEBI, 0.5, bar_s=30.0, reason="wrong bytes", accuse=True)
    first = await live.release(taken.transfer_id, report)
    again = await live.release(taken.transfer_id, report)
    assert first is not None and (first.first, first.barred) == (True, True)
    assert again is not None and (again.first, again.barred) == (False, True)
    (held,) = await live.sources(DIGEST)
    assert held.measured.samples == 1
    assert await live.release("nobody", report) is None
    assert await live.transfer("nobody") is None


async def test_a_barred_source_is_seen_and_refuses_until_its_time_is_up(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    taken = await live.acquire(place())
    await live.release(taken.transfer_id, Report(0, 0.0, bar_s=1.5, reason="wrong bytes"))
    await live.announce(source(), ttl_s=30)
    (held,) = await live.sources(DIGEST)
    assert held.barred == "wrong bytes" and 0 < held.barred_for_s <= 1.5, "announcing is no way out"
    with pytest.raises(Overloaded, match="wrong bytes"):
        await live.acquire(place(reader="r2"))
    await asyncio.sleep(1.6)
    assert (await live.sources(DIGEST))[0].barred == ""
    await live.acquire(place(reader="r2"))


async def test_a_report_about_an_earlier_life_bars_nobody(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    taken = await live.acquire(place())
    await live.announce(source(incarnation="w1-life-2"), ttl_s=30)
    released = await live.release(taken.transfer_id, Report(0, 0.0, bar_s=30.0, reason="lied"))
    assert released is not None and not released.barred
    (held,) = await live.sources(DIGEST)
    assert (held.barred, held.readers, held.source.incarnation) == ("", 0, "w1-life-2")


async def test_an_earlier_life_cannot_announce_itself_again(live: LiveStore) -> None:
    """B144, B146: a paused process wakes up after its successor has taken over."""
    await live.announce(source(), ttl_s=30)
    await live.announce(source(incarnation="w1-life-2", url="http://127.0.0.1:9/new"), ttl_s=30)
    with pytest.raises(StaleEpoch):
        await live.announce(source(), ttl_s=30)
    (held,) = await live.sources(DIGEST)
    assert held.source.url == "http://127.0.0.1:9/new"


async def test_a_source_that_changes_what_it_holds_is_found_under_the_new_digest(
    live: LiveStore,
) -> None:
    await live.announce(source(), ttl_s=30)
    await live.acquire(place())
    await live.announce(source(digest=OTHER), ttl_s=30)
    assert await live.sources(DIGEST) == []
    (held,) = await live.sources(OTHER)
    assert held.readers == 0
    with pytest.raises(NotFound, match=OTHER):
        await live.acquire(place())


async def test_a_withdrawn_source_is_gone_at_once(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    await live.acquire(place())
    assert await live.withdraw("w1") is True
    assert await live.withdraw("w1") is False
    assert await live.sources(DIGEST) == []
    assert await live.readers("w1") == 0
    with pytest.raises(NotFound):
        await live.acquire(place())


async def test_storage_needs_no_announcement_and_is_bounded_too(live: LiveStore) -> None:
    def at_storage(reader: str) -> Place:
        return place("storage:r", reader, f"q-{reader}", readers_max=2, tier=WeightTier.L4_OBJECT)

    taken = await live.acquire(at_storage("a"))
    await live.acquire(at_storage("b"))
    with pytest.raises(Overloaded):
        await live.acquire(at_storage("c"))
    found = await live.transfer(taken.transfer_id)
    assert found is not None and found.tier is WeightTier.L4_OBJECT and found.readers_before == 1
    assert await live.readers("storage:r") == 2
    assert await live.count() == (0, 2)


async def test_bandwidth_is_learnt_alike_by_every_store(live: LiveStore) -> None:
    """The figures are those of `sources.learn`, worked out by hand: mean += 0.3 (rate - mean)."""
    await live.announce(source(), ttl_s=30)
    for elapsed_s in (1.0, 0.5, 2.0):
        taken = await live.acquire(place(request=os.urandom(4).hex()))
        await live.release(taken.transfer_id, Report(100 * MEBI, elapsed_s))
    short = await live.acquire(place())
    await live.release(short.transfer_id, Report(10, 1e-6))
    untrusted = await live.acquire(place())
    await live.release(untrusted.transfer_id, Report(100 * MEBI, 1e-3, learn_rate=False))
    mean = 100.0
    for rate in (200.0, 50.0):
        mean += 0.3 * (rate - mean)
    (held,) = await live.sources(DIGEST)
    tier = (await live.tiers())[WeightTier.L1_HOST]
    for found in (held.measured, tier):
        assert found.samples == 3
        assert found.mean_bytes_per_s == pytest.approx(mean * MEBI)
        assert found.best_bytes_per_s == pytest.approx(200 * MEBI)


async def test_a_shared_source_is_credited_with_what_all_its_readers_got(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    await live.acquire(place(reader="a"))
    second = await live.acquire(place(reader="b"))
    await live.release(second.transfer_id, Report(100 * MEBI, 1.0))
    (held,) = await live.sources(DIGEST)
    assert held.measured.mean_bytes_per_s == pytest.approx(200 * MEBI)


async def test_a_readers_accusations_of_others_are_remembered(live: LiveStore) -> None:
    for name in ("w1", "w2", "w3"):
        await live.announce(source(name), ttl_s=30)
    counts = []
    for name in ("w1", "w2", "w3"):
        taken = await live.acquire(place(name))
        found = await live.transfer(taken.transfer_id)
        assert found is not None
        counts.append(found.accused_before)
        await live.release(taken.transfer_id, Report(0, 0.0, accuse=True))
    assert counts == [0, 1, 2]


# --------------------------------------------------- leases with life and layout, and who is behind


async def test_a_place_tells_the_life_and_layout_and_refuses_another(live: LiveStore) -> None:
    await live.announce(source(layout_digest="packed/2"), ttl_s=30)
    with pytest.raises(IdentityMismatch, match="layout_digest: needed as in the manifest, found p"):
        await live.acquire(place())
    with pytest.raises(StaleEpoch) as caught:
        await live.acquire(place(source_incarnation="w1-life-0", layout_digest="packed/2"))
    assert caught.value.found == "w1-life-1"
    mine = place(source_incarnation="w1-life-1", layout_digest="packed/2")
    for _taken_and_renewed in range(2):
        taken = await live.acquire(mine)
        assert (taken.source_incarnation, taken.layout_digest) == ("w1-life-1", "packed/2")
        assert taken.readers == 1
    await live.announce(source(incarnation="w1-life-2", layout_digest="packed/2"), ttl_s=30)
    with pytest.raises(StaleEpoch):
        await live.acquire(mine)
    assert await live.readers("w1") == 0, "the places of the earlier life are gone"


async def test_of_many_that_planned_at_once_one_comes_in_and_the_others_plan_anew(
    live: LiveStore,
) -> None:
    await live.announce(source(readers_max=8), ttl_s=30)
    answers = await asyncio.gather(
        *(live.acquire(place(reader=f"r{i}", readers_seen=0)) for i in range(12)),
        return_exceptions=True,
    )
    assert sum(not isinstance(a, BaseException) for a in answers) == 1
    late = [a for a in answers if isinstance(a, Overloaded)]
    assert len(late) == 11 and all("plan anew" in str(a) for a in late)
    assert all(0 < (a.retry_after_s or 0) < 0.1 for a in late)
    assert (await live.acquire(place(reader="r99", readers_seen=1))).readers == 2


async def test_a_leaving_source_keeps_its_readers_and_takes_no_new_ones(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    first = await live.acquire(place())
    await live.announce(source(draining=True), ttl_s=30)
    assert (await live.acquire(place())).transfer_id == first.transfer_id, "renewed"
    with pytest.raises(Overloaded, match="it leaves"):
        await live.acquire(place(reader="r2"))
    assert await live.readers("w1") == 1


async def test_readers_never_read_from_one_another_in_a_circle(live: LiveStore) -> None:
    await live.announce(source("root"), ttl_s=30)
    for name in ("a", "b", "c"):
        await live.announce(source(name, partial=True), ttl_s=30)

    async def reads(reader: str, name: str) -> Transfer:
        return await live.acquire(place(name, reader, f"{reader}-{name}"))

    await reads("b", "a")
    last = await reads("c", "b")
    seen = {held.source.source_id: held.reads_from for held in await live.sources(DIGEST)}
    assert seen == {"root": (), "a": (), "b": ("a",), "c": ("b",)}
    for reader, name in (("a", "b"), ("a", "c"), ("a", "a")):
        with pytest.raises(Overloaded, match="reads from this reader"):
            await reads(reader, name)
    await reads("a", "root")
    await live.release(last.transfer_id, Report(0, 0.0))
    assert (await live.sources(DIGEST))[2].reads_from == (), "c reads from nobody any more"
    await reads("a", "c")
    await live.announce(source("a", held=((0, 7),), partial=True), ttl_s=30)
    held = {one.source.source_id: one.source for one in await live.sources(DIGEST)}
    assert held["a"].held == ((0, 7),) and held["a"].readers == 1, "it got on and keeps its readers"


async def test_a_place_at_one_that_still_loads_says_nothing_of_bandwidth(live: LiveStore) -> None:
    await live.announce(source(partial=True), ttl_s=30)
    taken = await live.acquire(place())
    await live.release(taken.transfer_id, Report(100 * MEBI, 10.0))
    assert await live.tiers() == {} and (await live.sources(DIGEST))[0].measured.samples == 0


async def test_a_serving_source_gives_at_the_rate_that_serving_leaves(live: LiveStore) -> None:
    await live.announce(source(bandwidth_bytes_per_s=1e9), ttl_s=30)
    assert (await live.acquire(place())).bytes_per_s == 0.0
    await live.announce(source(bandwidth_bytes_per_s=1e9, slo_share=0.825), ttl_s=30)
    assert (await live.acquire(place())).bytes_per_s == pytest.approx(0.5e9)
    assert (await live.acquire(place(reader="r2"))).bytes_per_s == pytest.approx(0.25e9)


async def test_barred_again_means_barred_for_longer_and_each_bar_is_told(live: LiveStore) -> None:
    await live.announce(source(), ttl_s=30)
    for round_ in range(3):
        taken = await live.acquire(place(request=f"q{round_}"))
        await live.release(taken.transfer_id, Report(0, 0.0, bar_s=0.25, reason=f"lied {round_}"))
        (held,) = await live.sources(DIGEST)
        assert held.barred_for_s <= 0.25 * 2**round_
        await asyncio.sleep(max(held.barred_for_s, 0.0) + 0.02)
    told = await live.bars()
    assert [(b.reason, b.bar_s) for b in told[:3]] == [
        ("lied 2", 1.0),
        ("lied 1", 0.5),
        ("lied 0", 0.25),
    ]
    latest = told[0]
    assert (latest.source_id, latest.source_incarnation, latest.reader, latest.digest) == (
        "w1",
        "w1-life-1",
        "r1",
        DIGEST,
    )
    assert 0 <= latest.ago_s < 5 and latest.tier is WeightTier.L1_HOST
