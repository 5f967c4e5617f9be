"""Tags that agents set (compiled code, KV sizes, withdrawals) keep nothing alive by themselves."""

from pathlib import Path

import pytest

from readyplane.core.errors import Conflict, NotFound, Refused
from readyplane.core.resolution import withdrawn_tag
from readyplane_registry.retention import DAY_S, ManifestFacts, RetentionPolicy, retention
from tests.registry_data import model_folder
from tests.unit.test_field_registry_integrity import World

NOW_S = 100 * DAY_S
POLICY = RetentionPolicy()
OLD = "sha256:" + "a" * 64


def kept(*tags: str, newest: bool = False, **facts: float) -> str:
    """Why an old compile artifact stays; empty when it goes."""
    mine = ManifestFacts(OLD, "m", "compile", 1, 0.0, tags=tags, **facts)
    later = ManifestFacts("sha256:later", "m", "compile", 0 if newest else 2, 99 * DAY_S)
    found = retention([mine, later], now_s=NOW_S, policy=POLICY)
    return next((k.why for k in found.kept if k.digest == OLD), "")


@pytest.mark.parametrize("tag", ["compile/abc", "kv/abc", withdrawn_tag(OLD)])
def test_what_only_agents_have_named_goes_when_nobody_asks_for_it(tag: str) -> None:
    assert kept(tag) == ""
    assert "tag prod points at it" in kept(tag, "prod"), "a person's tag is another matter"
    assert "a worker asked for it 29.0 days ago" in kept(tag, used_s=71 * DAY_S)
    assert kept(tag, used_s=70 * DAY_S) == ""
    assert "a tag moved away" in kept(tag, left_s=71 * DAY_S)


def test_the_newest_stays_unless_it_was_withdrawn() -> None:
    assert "newest compile of model m" in kept("compile/abc", newest=True)
    assert kept("compile/abc", withdrawn_tag(OLD), newest=True) == ""


async def test_old_code_is_untagged_retired_and_its_bytes_go(tmp_path: Path) -> None:
    """Its name may be given again afterwards, as if it had never been."""
    world = World(tmp_path)
    old = await world.publish(model_folder(tmp_path / "old"), tag="compile/one")
    new = await world.publish(model_folder(tmp_path / "new", salt=1), tag="compile/two")
    full = world.disk_bytes()
    world.clock.now += 29 * DAY_S
    assert (await world.collect()).retired == ()
    world.collecting.note_use(new.digest)
    found = await world.collect(after_days=2)
    assert found.retired == (old.digest,), "the other was asked for, and is the newest as well"
    assert [t.name for t in await world.registry.list_tags()] == ["compile/two"]
    with pytest.raises(NotFound):
        await world.registry.resolve("compile/one")
    await world.collect(after_days=1)
    assert world.disk_bytes() < full
    assert (await world.registry.verify(new.digest)).ok
    again = await world.publish(model_folder(tmp_path / "old"), tag="compile/one")
    assert again.digest == old.digest and again.tag is not None and again.tag.version == 3


async def test_what_was_withdrawn_goes_and_stays_withdrawn_when_it_comes_back(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    bad = await world.publish(model_folder(tmp_path / "bad"), tag="compile/one")
    await world.registry.set_tag(withdrawn_tag(bad.digest), bad.digest)
    found = await world.collect(after_days=31)
    assert found.retired == (bad.digest,)
    back = await world.publish(model_folder(tmp_path / "bad"), tag="compile/one")
    assert back.digest == bad.digest
    with pytest.raises(NotFound, match="withdrawn"):
        await world.registry.resolve("compile/one")


async def test_a_tag_that_moves_during_a_collection_keeps_its_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the removal believed is compared: nothing that somebody names now is hidden."""
    world = World(tmp_path)
    old = await world.publish(model_folder(tmp_path / "old"), tag="compile/one")
    new = await world.publish(model_folder(tmp_path / "new", salt=1))
    world.clock.now += 31 * DAY_S
    removing = world.catalog.remove_tag

    async def late(name: str, *, expected_digest: str, force: bool, now_s: float) -> object:
        await world.catalog.set_tag(
            name, new.digest, expected_digest=expected_digest, force=False, now_s=now_s
        )
        return await removing(name, expected_digest=expected_digest, force=force, now_s=now_s)

    monkeypatch.setattr(world.catalog, "remove_tag", late)
    found = await world.collect()
    assert found.retired == ()
    assert "its tag moved just now" in [k.why for k in found.kept if k.digest == old.digest]
    tag = await world.catalog.get_tag("compile/one")
    assert tag is not None and tag.digest == new.digest


async def test_a_person_retires_what_a_tag_names_after_taking_that_away(tmp_path: Path) -> None:
    world = World(tmp_path)
    made = await world.publish(model_folder(tmp_path / "m"), tag="m:prod")
    with pytest.raises(Refused, match="m:prod"):
        await world.registry.retire(made.digest)
    with pytest.raises(Conflict):
        await world.registry.remove_tag("m:prod", expected_digest=OLD)
    await world.registry.remove_tag("m:prod", expected_digest=made.digest)
    assert await world.registry.retire(made.digest)
