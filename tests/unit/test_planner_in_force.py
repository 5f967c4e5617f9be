"""The policy in force: an artifact that cannot serve is refused, one that nobody can ask about told."""

from collections.abc import Mapping

import pytest

from readyplane.core.errors import InvalidField, NotFound, Unavailable
from readyplane.core.identity import Manifest
from tests.unit.planner_world import HandClock, World, planner, policy
from tests.unit.test_planner_rollout_service import Names, manifest, serving


async def test_a_manifest_that_cannot_serve_is_refused_as_a_roll_out_is() -> None:
    run, names = await serving()
    names.known["foreign"] = manifest(3, model="another")
    names.known["wide"] = manifest(4, tp=8)
    before = await run.service.get_policy()
    for name, why in (
        ("nope", "no such artifact; name one of `readyplane artifact list`"),
        ("sha256:" + "0" * 64, "no such artifact"),
        ("foreign", "it is of another, this planner plans"),
        ("wide", "placed for 8 GPUs"),
    ):
        with pytest.raises(InvalidField) as caught:
            await run.service.set_policy({"manifest": name}, merge=True)
        assert (caught.value.field, caught.value.value) == ("policy.manifest", name)
        assert why in caught.value.remedy
    assert await run.service.get_policy() == before
    _, version = await run.service.set_policy({"manifest": "other", "headroom": 0.2}, merge=True)
    assert version == before[1] + 1
    assert not (await run.service.state())["policy_warnings"]


async def test_what_does_not_name_another_artifact_asks_nobody() -> None:
    run, names = await serving()
    names.known.clear()
    policy_now, version = await run.service.get_policy()
    assert (await run.service.set_policy({"headroom": 0.3}, merge=True))[1] == version + 1
    whole = {**policy_now, "headroom": 0.4}
    assert (await run.service.set_policy(whole))[1] == version + 2


class Away(Names):
    """A registry that does not answer for a while."""

    away: Exception | None = Unavailable("the registry is away", "wait")

    async def resolve(
        self, reference: str, *, kind: str = "weights", need: Mapping[str, str] | None = None
    ) -> Manifest:
        if self.away is not None:
            raise self.away
        return await super().resolve(reference, kind=kind, need=need)


@pytest.mark.parametrize("how", [Unavailable("away", "wait"), OSError("refused"), TimeoutError()])
async def test_a_registry_that_is_away_is_told_until_it_has_answered(how: Exception) -> None:
    names = Away(later=manifest(5))
    names.away = how
    run = await planner(World(HandClock()), policy(), registry=names, resolve_every_s=1.0)
    await run.step(3)
    await run.service.set_policy({"manifest": "later"}, merge=True)
    (warned,) = (await run.service.state())["policy_warnings"]
    assert (warned["code"], warned["field"]) == ("manifest_unchecked", "policy.manifest")
    assert "policy.manifest = later could not be checked" in warned["text"]
    names.away = None
    await run.step(3)
    assert not (await run.service.state())["policy_warnings"]


async def test_a_file_may_name_what_is_published_later() -> None:
    run, _names = await serving()
    await run.service.adopt(policy(manifest="tomorrow"))
    assert (await run.service.get_policy())[0]["manifest"] == "tomorrow"
    await run.step(3)
    assert "artifact tomorrow" in (await run.service.state())["degraded"]
    with pytest.raises(NotFound, match="no-such-model"):
        await run.service.get_policy("no-such-model")
