"""The largest clients of labelled traffic: who is told of, what is counted, and what it may cost."""

import random

import pytest

from readyplane.core.breakdown import ClientSignals
from readyplane.core.worker import Role
from readyplane_router.clients import (
    CLIENTS_KEPT_MAX,
    CLIENTS_TOLD_MAX,
    HALF_LIFE_S,
    NAME_CHARS_MAX,
    Clients,
    bounded_name,
)
from tests.router_world import MODEL, World, on_virtual_time, shape

LONG = "x" * 5000


def told(clients: Clients) -> dict[str, ClientSignals]:
    return {c.client: c for c in clients.top()}


@pytest.mark.parametrize(
    ("tenant", "name"),
    [
        ("team-a", "team-a"),
        ("Ärzte & Söhne", "Ärzte & Söhne"),
        ("n" * NAME_CHARS_MAX, "n" * NAME_CHARS_MAX),
        ("two\nlines", "twolines~"),
        ("\ud800", "~"),
        (LONG, "x" * (NAME_CHARS_MAX - 17) + "~"),
    ],
)
def test_names_are_short_and_fit_to_be_told(tenant: str, name: str) -> None:
    found = bounded_name(tenant)
    assert found.startswith(name) and len(found) <= NAME_CHARS_MAX
    assert found.isprintable() and found.encode("utf-8")


def test_names_that_begin_alike_stay_apart() -> None:
    assert bounded_name(LONG + "1") != bounded_name(LONG + "2")
    assert bounded_name("a\n") != bounded_name("a\r")


def test_the_largest_are_told_of_with_exactly_what_they_brought() -> None:
    """Twenty thousand names of one request each neither fill the memory nor hide who is large."""
    clients, draws = Clients(), random.Random(1)
    sent = {"large": 0, "second": 0}
    for i in range(20_000):
        at_s = i * 0.01
        clients.add(f"junk-{i}", uncached_tokens=300, output_tokens=50.0, now_s=at_s)
        for name, chance in (("large", 0.2), ("second", 0.1)):
            if draws.random() < chance:
                sent[name] += 1
                clients.add(name, uncached_tokens=1000, output_tokens=200.0, now_s=at_s)
    found = told(clients)
    assert list(found) == ["large", "second"]
    for name, count in sent.items():
        assert found[name].arrivals_total == count
        assert found[name].arrival_uncached_tokens_total == 1000 * count
    assert len(clients._kept) == CLIENTS_KEPT_MAX


def test_who_was_large_once_makes_room() -> None:
    clients = Clients()
    for i in range(3 * CLIENTS_TOLD_MAX):
        clients.add(f"old-{i}", uncached_tokens=10_000, output_tokens=0.0, now_s=0.0)
    assert len(told(clients)) == CLIENTS_TOLD_MAX
    later_s = 100 * HALF_LIFE_S
    clients.add("new", uncached_tokens=10, output_tokens=0.0, now_s=later_s)
    assert list(told(clients)) == ["new"]


def test_a_client_that_comes_back_is_another_life_from_zero() -> None:
    clients = Clients()
    clients.add("a", uncached_tokens=1, output_tokens=0.0, now_s=0.0)
    first = clients._kept["a"].life
    for i in range(CLIENTS_KEPT_MAX):
        clients.add(f"b-{i}", uncached_tokens=100, output_tokens=0.0, now_s=1.0)
    assert "a" not in clients._kept
    clients.add("a", uncached_tokens=5000, output_tokens=0.0, now_s=2.0)
    again = told(clients)["a"]
    assert again.life > first and again.arrival_uncached_tokens_total == 5000


def test_only_labelled_requests_are_told_of_by_client() -> None:
    async def main(world: World) -> None:
        router = await world.router()
        await world.worker(router, "p-1", Role.PREFILL)
        await world.worker(router, "d-1", Role.DECODE)
        await router.route(shape("b", 320, first=90_000, tenant="b"), dry_run=True)
        await router.route(shape("r1"))
        assert (await router.signals(MODEL)).models[MODEL].clients == ()
        for i in range(3):
            await router.route(shape(f"a{i}", first=10_000 * (i + 1), tenant="a"))
        await router.route(shape("a0", first=10_000, tenant="a"))  # the same call once more
        seen = (await router.signals(MODEL)).models[MODEL]
        assert seen.clients == (ClientSignals("a", 1, 3, 480),)
        assert seen.arrivals_total == 4 and seen.arrival_uncached_tokens_total == 640

    on_virtual_time(main)
