"""What is only added, what keeps bytes, and how they are taken away: on memory and on Postgres."""

import asyncio
import hashlib
import importlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine

from readyplane.core.errors import Conflict, InvalidField, NotFound, Refused, Unavailable
from readyplane.core.identity import Manifest, canonical
from readyplane.core.resolution import withdrawn_tag
from readyplane.core.trust import SIGNATURES_MAX, Signature, key_id
from readyplane.kit.clock import SystemClock
from readyplane.kit.database import async_engine, migrate
from readyplane_registry import keeping as keeping_port
from readyplane_registry.keeping import KeepingStore, MemoryKeeping
from readyplane_registry.postgres import PostgresCatalog
from readyplane_registry.postgres_keeping import PostgresKeeping
from readyplane_registry.store import CatalogStore, ManifestRecord, MemoryCatalog, record_of
from tests.registry_data import document

NOW_S = 1_700_000_000.0
GRACE_S = 100.0
UNKNOWN = "sha256:" + "0" * 64


@dataclass
class Stores:
    catalog: CatalogStore
    keeping: KeepingStore
    engine: AsyncEngine | None


@pytest.fixture(params=["memory", "postgres"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[Stores]:
    if request.param == "memory":
        catalog = MemoryCatalog()
        yield Stores(catalog, MemoryKeeping(catalog, SystemClock()), None)
        return
    url = request.getfixturevalue("database_url")
    await migrate(url, "readyplane_registry")
    engine = async_engine(url)
    yield Stores(PostgresCatalog(engine), PostgresKeeping(engine), engine)
    await engine.dispose()


def record(data: bytes, model: str = "demo") -> ManifestRecord:
    manifest = Manifest.from_document(document(model, salt=os.urandom(8).hex(), data=data))
    return record_of(manifest, canonical(manifest.document()), now_s=NOW_S)


def blob(data: bytes | None = None) -> str:
    return "sha256:" + hashlib.sha256(os.urandom(16) if data is None else data).hexdigest()


async def published(stores: Stores, model: str = "demo") -> tuple[str, str]:
    """(digest, sha256 of its one file) of a new manifest."""
    data = os.urandom(32)
    stored, _ = await stores.catalog.put_manifest(record(data, model))
    return stored.digest, blob(data)


async def gone(_sha256: str) -> int:
    return 7


async def mark(stores: Stores, *names: str, later_s: float = 0.0) -> tuple[str, ...]:
    return await stores.keeping.mark(
        dict.fromkeys(names, 7), now_s=NOW_S + later_s, grace_s=GRACE_S
    )


# ------------------------------------------------------------------------- what is only added


async def test_a_signature_is_stored_once_a_key_and_never_replaced(stores: Stores) -> None:
    digest, _ = await published(stores)
    keys = [os.urandom(32) for _ in range(SIGNATURES_MAX + 1)]
    first = Signature(key_id(keys[0]), keys[0], "{}")
    answers = await asyncio.gather(
        *(stores.catalog.put_signature(digest, first, now_s=NOW_S) for _ in range(8))
    )
    assert sum(answers) == 1
    again = Signature(first.key_id, keys[0], '{"other":1}')
    assert await stores.catalog.put_signature(digest, again, now_s=NOW_S) is False
    assert [s.envelope for s in (await stores.catalog.trail(digest)).signatures] == ["{}"]
    for key in keys[1:-1]:
        await stores.catalog.put_signature(digest, Signature(key_id(key), key, "{}"), now_s=NOW_S)
    last = Signature(key_id(keys[-1]), keys[-1], "{}")
    with pytest.raises(Refused, match="most that are kept"):
        await stores.catalog.put_signature(digest, last, now_s=NOW_S)
    with pytest.raises(NotFound):
        await stores.catalog.put_signature(UNKNOWN, first, now_s=NOW_S)


async def test_origins_are_appended_when_they_are_news(stores: Stores) -> None:
    digest, _ = await published(stores)
    put = stores.catalog.put_event
    assert await put(digest, "origin", {"commit": "a"}, now_s=NOW_S)
    assert not await put(digest, "origin", {"commit": "a"}, now_s=NOW_S)
    assert not await put(digest, "origin", {}, now_s=NOW_S)
    assert await put(digest, "origin", {"commit": "b"}, now_s=NOW_S + 1)
    trail = await stores.catalog.trail(digest)
    assert [dict(e.detail) for e in trail.events] == [{"commit": "a"}, {"commit": "b"}]
    assert trail.origin == {"commit": "b"} and not trail.retired
    with pytest.raises(NotFound):
        await put(UNKNOWN, "origin", {"commit": "a"}, now_s=NOW_S)


async def test_b114_a_retired_manifest_is_hidden_and_its_identity_stays_its_own(
    stores: Stores,
) -> None:
    """B114: a name is bound to content for life; what comes back is the same artifact."""
    mine = record(b"b114", model="b114")
    await stores.catalog.put_manifest(mine)
    assert await stores.catalog.put_event(mine.digest, "retired", {}, now_s=NOW_S)
    assert not await stores.catalog.put_event(mine.digest, "retired", {}, now_s=NOW_S)
    assert await stores.catalog.list_manifests(model="b114") == []
    held = await stores.catalog.get_manifest(mine.digest)
    assert held is not None and held.document == mine.document, "what was published stays readable"
    with pytest.raises(Refused, match="retired"):
        await stores.catalog.set_tag(
            "b114/t", mine.digest, expected_digest="", force=True, now_s=NOW_S
        )
    stored, created = await stores.catalog.put_manifest(mine)
    assert (stored.digest, created) == (mine.digest, False)
    assert [e.event for e in (await stores.catalog.trail(mine.digest)).events] == [
        "retired",
        "restored",
    ]
    assert len(await stores.catalog.list_manifests(model="b114")) == 1


async def test_of_a_tag_and_a_retirement_at_once_exactly_one_wins(stores: Stores) -> None:
    for at in range(10):
        digest, _ = await published(stores)
        name = f"race/{os.urandom(4).hex()}"
        first = stores.catalog.set_tag(name, digest, expected_digest="", force=False, now_s=NOW_S)
        second = stores.catalog.put_event(digest, "retired", {}, now_s=NOW_S)
        both = (first, second) if at % 2 else (second, first)
        answers = await asyncio.gather(*both, return_exceptions=True)
        assert sum(isinstance(a, Refused) for a in answers) == 1, answers
        tagged = await stores.catalog.get_tag(name) is not None
        assert tagged != (await stores.catalog.trail(digest)).retired


async def test_of_two_publishers_of_one_tag_exactly_one_wins(stores: Stores) -> None:
    """Each publishes an artifact of its own, then points the tag that neither has seen."""
    for _round in range(8):
        mine, other = await published(stores), await published(stores)
        name = f"two/{os.urandom(4).hex()}"
        answers = await asyncio.gather(
            *(
                stores.catalog.set_tag(name, d, expected_digest="", force=False, now_s=NOW_S)
                for d, _blob in (mine, other)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(a, Conflict) for a in answers) == 1, answers
        assert len(await stores.catalog.tag_history(name)) == 1


# ------------------------------------------------------------------- what keeps bytes, and not


async def test_only_what_nothing_keeps_is_marked(stores: Stores) -> None:
    digest, named = await published(stores)
    held, orphan = blob(), blob()
    await stores.keeping.hold("up-1", [held], ttl_s=60)
    assert await stores.keeping.unkept([named, held, orphan], now_s=NOW_S, grace_s=GRACE_S) == (
        orphan,
    )
    assert await mark(stores, named, held, orphan) == (orphan,)
    assert await mark(stores, named, held, orphan) == (), "marked once"
    assert [e.sha256 for e in await stores.keeping.evicting()].count(orphan) == 1
    await stores.keeping.release("up-1")
    assert await mark(stores, held) == (held,)
    await stores.catalog.put_event(digest, "retired", {}, now_s=NOW_S)
    assert await mark(stores, named, later_s=GRACE_S - 1) == (), "readers may be under way"
    await stores.keeping.note_uses([digest], now_s=NOW_S + GRACE_S / 2)
    assert await mark(stores, named, later_s=GRACE_S + 1) == (), "used since"
    assert await mark(stores, named, later_s=2 * GRACE_S) == (named,)


async def test_bytes_that_two_manifests_name_are_kept_for_the_one_that_is_left(
    stores: Stores,
) -> None:
    data = os.urandom(16)
    one, two = record(data), record(data)
    for each in (one, two):
        await stores.catalog.put_manifest(each)
    await stores.catalog.put_event(one.digest, "retired", {}, now_s=NOW_S)
    assert await mark(stores, blob(data), later_s=2 * GRACE_S) == ()
    await stores.catalog.put_event(two.digest, "retired", {}, now_s=NOW_S)
    assert await mark(stores, blob(data), later_s=2 * GRACE_S) == (blob(data),)


async def test_a_hold_ends_by_itself_and_is_prolonged_as_a_whole(stores: Stores) -> None:
    early, late = blob(), blob()
    await stores.keeping.hold("up-2", [early], ttl_s=0.2)
    await asyncio.sleep(0.1)
    await stores.keeping.hold("up-2", [late], ttl_s=0.4)
    await asyncio.sleep(0.2)
    assert await mark(stores, early, late) == ()
    await asyncio.sleep(0.4)
    assert set(await mark(stores, early, late)) == {early, late}


async def test_an_upload_holds_within_a_bound(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("readyplane_registry.keeping", "readyplane_registry.postgres_keeping"):
        monkeypatch.setattr(f"{module}.HELD_MAX", 3)
    await stores.keeping.hold("up-3", [blob() for _ in range(3)], ttl_s=60)
    with pytest.raises(InvalidField, match="hold"):
        await stores.keeping.hold("up-3", [blob()], ttl_s=60)
    assert keeping_port.HELD_MAX == 3


async def test_b119_b124_what_is_needed_again_is_rescued_from_its_mark(stores: Stores) -> None:
    name = blob()
    assert await mark(stores, name) == (name,)
    await stores.keeping.hold("up-4", [name], ttl_s=60)
    assert name not in [e.sha256 for e in await stores.keeping.evicting()]
    assert await stores.keeping.evict(name, gone) is None
    assert await mark(stores, name) == ()


async def test_b120_a_deletion_that_fails_stays_evicting_and_is_tried_again(
    stores: Stores,
) -> None:
    name = blob()
    await mark(stores, name)

    async def full(_sha256: str) -> int:
        raise Unavailable("disk is read-only", "mount it")

    for attempt in (1, 2):
        with pytest.raises(Unavailable):
            await stores.keeping.evict(name, full)
        (mine,) = [e for e in await stores.keeping.evicting() if e.sha256 == name]
        assert mine.attempts == attempt and "read-only" in mine.last_error
    assert await stores.keeping.evict(name, gone) == 7
    assert name not in [e.sha256 for e in await stores.keeping.evicting()]
    assert await stores.keeping.evict(name, gone) is None, "confirmed once"


async def test_a_holder_waits_for_a_deletion_that_is_under_way(stores: Stores) -> None:
    """It must not be told "stored" of bytes that are gone a moment later."""
    name = blob()
    await mark(stores, name)
    begun, go = asyncio.Event(), asyncio.Event()
    bytes_there = True

    async def slow(_sha256: str) -> int:
        nonlocal bytes_there
        begun.set()
        await go.wait()
        bytes_there = False
        return 7

    evicting = asyncio.create_task(stores.keeping.evict(name, slow))
    await begun.wait()
    holding = asyncio.create_task(stores.keeping.hold("up-5", [name], ttl_s=60))
    await asyncio.sleep(0.2)
    assert not holding.done()
    go.set()
    assert await evicting == 7
    await holding
    assert not bytes_there, "whoever asks after its hold sees that they must come again"
    assert await mark(stores, name) == ()


async def test_facts_tell_tags_moves_and_uses(stores: Stores) -> None:
    model = f"facts-{os.urandom(4).hex()}"
    old, _ = await published(stores, model)
    new, _ = await published(stores, model)
    name = f"{model}/prod"
    await stores.catalog.set_tag(name, old, expected_digest="", force=False, now_s=NOW_S)
    await stores.catalog.set_tag(name, new, expected_digest=old, force=False, now_s=NOW_S + 5)
    await stores.keeping.note_uses([old, UNKNOWN], now_s=NOW_S + 9)
    await stores.keeping.note_uses([old], now_s=NOW_S + 3)
    facts = {f.digest: f for f in await stores.keeping.facts() if f.model == model}
    assert facts[old].left_s == NOW_S + 5 and facts[old].tags == ()
    assert facts[old].used_s == NOW_S + 9
    assert facts[new].tags == (name,) and facts[new].left_s is None and facts[new].used_s is None
    assert facts[old].sequence < facts[new].sequence
    await stores.catalog.put_event(old, "retired", {}, now_s=NOW_S)
    assert old not in {f.digest for f in await stores.keeping.facts()}


async def test_a_tag_that_was_taken_away_keeps_nothing_but_was_left_just_now(
    stores: Stores,
) -> None:
    model = f"untag-{os.urandom(4).hex()}"
    mine, _ = await published(stores, model)
    name = f"{model}/prod"
    await stores.catalog.set_tag(name, mine, expected_digest="", force=False, now_s=NOW_S)
    with pytest.raises(Refused):
        await stores.catalog.put_event(mine, "retired", {}, now_s=NOW_S)
    await stores.catalog.remove_tag(name, expected_digest=mine, force=False, now_s=NOW_S + 7)
    (facts,) = [f for f in await stores.keeping.facts() if f.model == model]
    assert facts.tags == () and facts.left_s == NOW_S + 7
    assert await stores.catalog.put_event(mine, "retired", {}, now_s=NOW_S + 8)


async def test_what_is_withdrawn_may_be_retired_and_stays_withdrawn(stores: Stores) -> None:
    """The word that nobody may resolve to it outlives its bytes, and their coming back."""
    model = f"withdrawn-{os.urandom(4).hex()}"
    bad, _ = await published(stores, model)
    tag = withdrawn_tag(bad)
    await stores.catalog.set_tag(tag, bad, expected_digest="", force=False, now_s=NOW_S)
    assert await stores.catalog.put_event(bad, "retired", {}, now_s=NOW_S)
    assert (await stores.catalog.tags_of([bad])) == {bad: (tag,)}


async def test_the_database_refuses_to_change_what_is_only_added(database_url: str) -> None:
    await migrate(database_url, "readyplane_registry")
    engine = async_engine(database_url)
    stores = Stores(PostgresCatalog(engine), PostgresKeeping(engine), engine)
    digest, _ = await published(stores)
    key = os.urandom(32)
    await stores.catalog.put_signature(digest, Signature(key_id(key), key, "{}"), now_s=NOW_S)
    await stores.catalog.put_event(digest, "origin", {"commit": "a"}, now_s=NOW_S)
    tables = ("manifest_signatures", "manifest_events", "manifest_blobs", "tag_history")
    forbidden = [f"TRUNCATE {table} CASCADE" for table in tables]
    forbidden += [f"DELETE FROM {table}" for table in tables[:3]]
    forbidden += [f"UPDATE {table} SET digest = digest" for table in tables[:3]]
    forbidden.append(
        "INSERT INTO manifest_signatures (digest, key_id, public_key, envelope, create_time)"
        f" VALUES ('{digest}', 'ed25519:another', '\\x00', '{{}}', now())"
    )
    try:
        for statement in forbidden:
            with pytest.raises(DBAPIError) as caught:
                async with engine.begin() as connection:
                    await connection.execute(text(statement))
            told = str(caught.value)
            assert "is refused" in told or "key_is_content" in told, f"{statement}: {told}"
        assert len((await stores.catalog.trail(digest)).signatures) == 1
    finally:
        await engine.dispose()


async def test_a_database_of_the_first_version_knows_its_blobs_after_the_upgrade(
    database_url: str,
) -> None:
    """What was published before references were kept is as safe from collection as what came after."""
    engine = async_engine(database_url)
    mine = record(b"published long ago")
    try:
        async with engine.begin() as connection:
            await connection.execute(text("DROP SCHEMA public CASCADE"))
            await connection.execute(text("CREATE SCHEMA public"))
            await connection.run_sync(_first_version)
        values = {f: getattr(mine, f) for f in ("digest", "document", "kind", "model")}
        columns = "digest, document, kind, model, size_bytes, file_count, tensor_count, create_time"
        async with engine.begin() as connection:
            await connection.execute(
                text(
                    f"INSERT INTO manifests ({columns})"
                    " VALUES (:digest, :document, :kind, :model, 1, 1, 1, now())"
                ),
                values,
            )
        await migrate(database_url, "readyplane_registry")
        keeping = PostgresKeeping(engine)
        orphan = blob()
        found = await keeping.unkept(
            [blob(b"published long ago"), orphan], now_s=NOW_S, grace_s=GRACE_S
        )
        assert found == (orphan,)
        held = await PostgresCatalog(engine).get_manifest(mine.digest)
        assert held is not None and held.manifest.digest == mine.digest
    finally:
        await engine.dispose()


def _first_version(connection: Connection) -> None:
    version = importlib.import_module("readyplane_registry.migrations.versions.0001_catalog")
    context = MigrationContext.configure(connection)
    with Operations.context(context):
        version.upgrade()
    connection.execute(text("CREATE TABLE alembic_version_registry (version_num text PRIMARY KEY)"))
    connection.execute(text("INSERT INTO alembic_version_registry VALUES ('registry_0001')"))
