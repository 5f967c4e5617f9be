"""Text tokenised in the gateway: only where the engines agree, and never once they have not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from readyplane.core.errors import InvalidField
from readyplane.kit.telemetry import Metrics
from readyplane_gateway import local_tokens
from readyplane_gateway.local_tokens import EQUAL_FIRST, LocalTokens
from readyplane_gateway.metrics import Meters
from readyplane_lab.up.demo_model import make_demo_model
from readyplane_registry.ingest import Facts, build_manifest
from tests.unit import gateway_world as gw


def folder(tmp_path: Path, offset: int = 3, model: str = gw.MODEL) -> Path:
    place = tmp_path / model.replace("/", "--")
    place.mkdir(exist_ok=True)
    (place / "tokenizer.json").write_text(json.dumps({"type": "bytes", "offset": offset}))
    return tmp_path


def use(world: gw.World, tmp_path: Path) -> LocalTokens:
    kept = LocalTokens.read(tmp_path, world.gateway.meters)
    world.gateway.proxy._tokens._local = kept
    workers = [
        replace(w, serving=replace(w.serving, tokenizer_digest=""))
        for w in world.router.fleet.workers.values()
        if w.serving is not None
    ]
    world.router.set_fleet(workers)
    return kept


def asked(world: gw.World) -> int:
    return sum(engine.tokenized for engine in world.engines.values())


def test_an_engine_is_asked_until_it_has_agreed_and_then_no_more(tmp_path: Path) -> None:
    async def story(world: gw.World) -> None:
        use(world, folder(tmp_path))
        for number in range(10):
            text = f"prompt {number} with an ümlaut"
            got = await world.ask({"model": gw.MODEL, "prompt": text})
            assert got.status == 200
            sent = world.router.asked[-1]["shape"]
            assert list(memoryview(sent.token_ids).cast("I")) == [b + 3 for b in text.encode()]
        assert asked(world) == EQUAL_FIRST
        assert world.metric("tokenized_total", how="local") == 10 - EQUAL_FIRST
        assert world.metric("tokenizer_parity_total", outcome="equal") == EQUAL_FIRST

    gw.play(story)


def test_one_difference_ends_it(tmp_path: Path) -> None:
    async def story(world: gw.World) -> None:
        use(world, folder(tmp_path, offset=4))
        for number in range(6):
            assert (await world.ask({"model": gw.MODEL, "prompt": f"text {number}"})).status == 200
            sent = world.router.asked[-1]["shape"]
            assert memoryview(sent.token_ids).cast("I")[0] == ord("t") + 3  # the engine's own
        assert asked(world) == 6
        assert world.metric("tokenizer_parity_total", outcome="differs") == 1

    gw.play(story)


def test_an_engine_that_changes_its_mind_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_tokens, "CHECK_EVERY", 4)

    async def story(world: gw.World) -> None:
        kept = use(world, folder(tmp_path))
        for number in range(EQUAL_FIRST):
            await world.ask({"model": gw.MODEL, "prompt": f"text {number}"})
        local = kept.of(gw.MODEL, "")
        assert local is not None
        local.encode = local_tokens.Bytes(9)  # as if the engines had another one now
        for number in range(5):
            await world.ask({"model": gw.MODEL, "prompt": f"more {number}"})
        await world.settle()
        assert kept.of(gw.MODEL, "") is None
        assert world.metric("tokenizer_parity_total", outcome="differs") == 1
        before = asked(world)
        await world.ask({"model": gw.MODEL, "prompt": "again"})
        assert asked(world) == before + 1

    gw.play(story)


def test_a_tokenizer_is_known_by_its_content(tmp_path: Path) -> None:
    demo = make_demo_model(tmp_path / "model", size_bytes=6 * 2**20, shards=1)
    manifest, *_ = build_manifest(
        demo.folder, model="demo", facts=Facts(config=demo.config, canary=demo.canary)
    )
    kept_in = tmp_path / "kept"
    kept_in.mkdir()
    place = kept_in / "whatever"
    place.mkdir()
    (place / "tokenizer.json").write_bytes((demo.folder / "tokenizer.json").read_bytes())
    kept = LocalTokens.read(kept_in, Meters(Metrics()))
    assert kept.of("demo", manifest.tokenizer_digest) is not None
    assert kept.of("whatever", "sha256:" + "0" * 64) is None  # its name alone is not enough
    assert kept.of("whatever", "") is not None  # but for engines whose files nobody knows
    assert kept.of("demo", "") is None


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "give a tokenizer.json"),
        ('{"type": "bytes", "offset": -1}', "offset"),
        ('{"version": "1.0", "model": {}}', "tokenizers"),
    ],
)
def test_what_cannot_be_used_is_said_at_the_start(tmp_path: Path, text: str, word: str) -> None:
    place = tmp_path / "m"
    place.mkdir()
    (place / "tokenizer.json").write_text(text)
    with pytest.raises(InvalidField, match=word):
        LocalTokens.read(tmp_path, Meters(Metrics()))
    with pytest.raises(InvalidField, match="folder"):
        LocalTokens.read(tmp_path / "nowhere", Meters(Metrics()))
