"""Before it loads, an agent looks for itself whether somebody it trusts has signed."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import InvalidField, Refused
from readyplane.core.identity import Manifest
from readyplane.core.trust import Signature, Trail
from readyplane.kit.clock import SystemClock
from readyplane.kit.signing import SigningKey
from readyplane_agent.vouching import refuse_untrusted
from tests.unit.agent_twins import artifact


class Registry:
    """Holds signatures, good or not, and counts who asks."""

    def __init__(self, *signatures: Signature) -> None:
        self.signatures, self.asked = signatures, 0

    async def trail(self, _digest: str) -> Trail:
        self.asked += 1
        return Trail(self.signatures)


def policy(folder: Path, key: SigningKey, mode: str, **more: str) -> Path:
    file = folder / "trust.json"
    public = base64.b64encode(key.public_key).decode()
    document = {
        "schema": "readyplane/trust/1",
        "keys": {"release": {"public_key": public, **more}},
        "models": {"tiny": {"mode": mode, "keys": ["release"]}},
    }
    file.write_text(json.dumps(document))
    return file


async def look(manifest: Manifest, registry: Any, file: Path | None) -> str:
    return await refuse_untrusted(manifest, registry=registry, trust_file=file, clock=SystemClock())


async def test_what_is_signed_is_loaded_and_what_is_not_is_refused(tmp_path: Path) -> None:
    manifest = artifact().manifest
    key, other = SigningKey.new(tmp_path / "k"), SigningKey.new(tmp_path / "o")
    file = policy(tmp_path, key, "require")
    good = Signature(key.key_id, key.public_key, key.envelope(manifest.digest))
    assert "signed by release" in await look(manifest, Registry(good), file)
    foreign = Signature(other.key_id, other.public_key, other.envelope(manifest.digest))
    stolen = Signature(key.key_id, key.public_key, key.envelope("sha256:" + "0" * 64))
    forged = Signature(key.key_id, other.public_key, other.envelope(manifest.digest))
    for bad in ((), (foreign,), (stolen,), (forged,)):
        with pytest.raises(Refused) as caught:
            await look(manifest, Registry(*bad), file)
        assert key.key_id in str(caught.value), "the key expected is named"


async def test_a_retired_key_vouches_for_nothing(tmp_path: Path) -> None:
    manifest = artifact().manifest
    key = SigningKey.new(tmp_path / "k")
    good = Signature(key.key_id, key.public_key, key.envelope(manifest.digest))
    file = policy(tmp_path, key, "require", retired="2020-01-01T00:00:00Z")
    with pytest.raises(Refused, match="retired"):
        await look(manifest, Registry(good), file)


async def test_a_warning_lets_it_load_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = policy(tmp_path, SigningKey.new(tmp_path / "k"), "warn")
    told = await look(artifact().manifest, Registry(), file)
    assert "no signature" in told and "although not trusted" in caplog.text


async def test_nobody_is_asked_without_a_policy(tmp_path: Path) -> None:
    registry = Registry()
    assert await look(artifact().manifest, registry, None) == ""
    off = policy(tmp_path, SigningKey.new(tmp_path / "k"), "off")
    assert await look(artifact().manifest, registry, off) == ""
    assert registry.asked == 0


async def test_a_policy_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "trust.json").write_text("{")
    for file in (tmp_path / "trust.json", tmp_path / "gone.json"):
        with pytest.raises(InvalidField):
            await look(artifact().manifest, Registry(), file)
