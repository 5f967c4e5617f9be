"""`readyplane artifact` against the registry's own use-cases, on memory stores and a blob folder."""

import base64
import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import Unavailable
from readyplane.core.trust import ModelTrust, TrustKey, TrustMode, TrustPolicy
from readyplane.kit.clock import SystemClock
from readyplane_registry.blob_files import FileBlobs
from readyplane_registry.blob_removal import FolderRemoval
from readyplane_registry.collecting import Collecting
from readyplane_registry.keeping import MemoryKeeping
from readyplane_registry.live import MemoryLive
from readyplane_registry.retention import RetentionPolicy
from readyplane_registry.service import RegistryService
from readyplane_registry.store import MemoryCatalog
from tests.registry_data import model_folder
from tests.unit.cli_world import Terminal, clean_environment, stand_in

GIVEN = ("--registry", "127.0.0.1:1", "--registry-http", "http://127.0.0.1:2")
ONLY = GIVEN[:2]
MODEL_TAG = "demo:latest"


class World:
    """A registry in this process, put where commands look for one."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = itertools.count()
        clock = SystemClock()
        self.blobs = FileBlobs(root)
        self.uploads = 0
        store, live = MemoryCatalog(), MemoryLive(clock, weight=0.3)
        self.trust = TrustPolicy()
        self.service = RegistryService(
            store=store,
            live=live,
            blobs=self.blobs,
            clock=clock,
            make_id=lambda: str(next(ids)),
            trust=lambda: self.trust,
            collecting=Collecting(
                store=store,
                keeping=MemoryKeeping(store, clock),
                live=live,
                removal=FolderRemoval(root, clock),
                clock=clock,
                policy=RetentionPolicy(keep_untagged_s=0, keep_history_s=0, grace_s=0),
            ),
        )
        stand_in(monkeypatch, "RegistryClient", self)
        monkeypatch.setattr("readyplane_registry.ingest.RemoteBlobs", self._blobs)
        for module in ("artifact", "artifact_keep"):
            monkeypatch.setattr(f"readyplane_lab.cli.{module}.ask_http", self._ask_http)
        self.asked_of: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.service, name)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _blobs(self, http: str, *, token: str = "") -> "World":
        self.asked_of.append((http, token))
        return self

    async def has(self, sha256: str, size_bytes: int) -> bool:
        return await self.blobs.has(sha256, size_bytes)

    async def put_file(self, sha256: str, path: Path, *, progress: Any = None) -> bool:
        if self.uploads < 0:
            raise Unavailable("the registry went away", "try again")
        self.uploads += 1
        return await self.blobs.put_file(sha256, path, progress=progress)

    async def _ask_http(self, method: str, url: str, token: str, **how: Any) -> dict[str, Any]:
        assert how["what"] == "the registry"
        if "/v1/collect?" in url:
            found = await self.service.collect(dry_run=url.endswith("dry_run=true"))
            return json.loads(json.dumps(asdict(found)))  # type: ignore[no-any-return]
        base, _, rest = url.partition("/v1/artifacts/")
        digest, _, verb = rest.partition("/")
        if verb.startswith("retire?reason="):
            return {"digest": digest, "retired": await self.service.retire(digest)}
        assert (method, base, verb) == ("POST", "http://127.0.0.1:2", "verify")
        checked = await self.service.verify(digest)
        return {"digest": digest, "ok": checked.ok, "files": [asdict(f) for f in checked.files]}


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Terminal:
    clean_environment(monkeypatch, tmp_path / "state")
    return Terminal(capfd)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return World(tmp_path / "blobs", monkeypatch)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_publish_list_show_and_again(cli: Terminal, world: World, folder: Path) -> None:
    argv = ("artifact", "publish", str(folder), "--model", "m", "--tag", "m:1", "--json", *GIVEN)
    first = cli(*argv).document
    assert set(first) == {
        *("digest", "created", "model", "size_bytes", "uploaded_bytes", "tag", "skipped"),
        *("origin", "signed_by", "canary"),
    }
    assert first["created"] is True and first["uploaded_bytes"] == first["size_bytes"] > 40_000
    assert first["tag"]["name"] == "m:1" and first["tag"]["digest"] == first["digest"]
    again = cli(*argv).document
    assert (again["created"], again["uploaded_bytes"]) == (False, 0), "nothing is sent twice"
    assert again["digest"] == first["digest"] and again["tag"]["version"] == 1
    (row,) = cli("artifact", "list", "--json", *ONLY).document["artifacts"]
    assert row["digest"] == first["digest"] and row["tags"] == ["m:1"] and row["file_count"] == 5
    assert cli("artifact", "list", "--model", "other", "--json", *ONLY).code == 1
    table = cli("artifact", "list", *ONLY).out
    assert first["digest"][:19] in table and max(map(len, table.splitlines())) <= 100
    for reference in (first["digest"], first["digest"][:15], "m:1", "m"):
        shown = cli("artifact", "show", reference, "--json", *ONLY).document
        assert shown["digest"] == first["digest"]
        assert shown["manifest"]["model"] == "m" and len(shown["manifest"]["files"]) == 5
    assert "tokenizer.json" in cli("artifact", "show", "m:1", *ONLY).out


def test_a_publication_that_was_broken_off_goes_on(
    cli: Terminal, world: World, folder: Path
) -> None:
    argv = ("artifact", "publish", str(folder), "--model", "m", "--tag", "m:1", *GIVEN)
    world.uploads = -1
    broken = cli(*argv)
    assert broken.code == 3 and "the registry went away" in broken.err
    assert cli("artifact", "list", "--json", *ONLY).document["artifacts"] == []
    assert cli("artifact", "tag", "--json", *ONLY).document["tags"] == []
    world.uploads = 0
    said = cli(*argv)
    assert "published sha256:" in said.out
    assert "no known answer" in said.err and "--canary" in said.err, "what follows is said"


def test_what_cannot_be_published(cli: Terminal, world: World, folder: Path) -> None:
    (folder / "extra.bin").write_bytes(b"x")
    said = cli("artifact", "publish", str(folder), "--model", "m", *GIVEN)
    assert (said.code, said.out) == (2, "") and "extra.bin" in said.err
    said = cli("artifact", "publish", str(folder / "none"), "--model", "m", *GIVEN)
    assert said.code == 2 and "give a folder" in said.err


def test_the_demo_model_is_the_same_each_time(cli: Terminal, world: World) -> None:
    argv = ("artifact", "publish", "--demo", "--model-mb", "16", "--json", *GIVEN)
    first, second = cli(*argv).document, cli(*argv).document
    assert first["created"] is True and second["created"] is False
    assert first["digest"] == second["digest"] and second["uploaded_bytes"] == 0
    assert first["tag"]["name"] == MODEL_TAG and first["model"] == "demo"
    manifest = cli("artifact", "show", MODEL_TAG, "--json", *ONLY).document["manifest"]
    assert manifest["canary"]["golden_token_ids"], "the known answer is recorded"
    other = cli(*argv[:-5], "--model", "mine", "--json", *GIVEN).document
    assert other["tag"] is None and other["digest"] != first["digest"]


def test_the_demo_model_takes_the_sizes_and_refuses_what_is_of_a_folder(
    cli: Terminal, world: World
) -> None:
    argv = ("artifact", "publish", "--demo", "--model-mb", "16", *GIVEN)
    sizes = ("--tp", "2", "--pp", "3", "--ep", "4", "--tag", "demo:cut")
    assert cli(*argv, *sizes).code == 0
    manifest = cli("artifact", "show", "demo:cut", "--json", *ONLY).document["manifest"]
    assert manifest["parallel"] == {"tp": 2, "pp": 3, "ep": 4}
    before = world.uploads
    for flags in (
        ("--quantisation", "fp8"),
        ("--scales", "tensor:F32"),
        ("--revision", "main"),
        ("--follow-links",),
    ):
        said = cli(*argv, *flags)
        assert (said.code, said.out) == (2, "") and flags[0] in said.err and "--demo" in said.err
    assert world.uploads == before


def test_tags_move_by_compare_and_set(
    cli: Terminal, world: World, folder: Path, tmp_path: Path
) -> None:
    def publish(path: Path) -> str:
        argv = ("artifact", "publish", str(path), "--model", "m", "--json", *GIVEN)
        return str(cli(*argv).document["digest"])

    one, two = publish(folder), publish(model_folder(tmp_path / "two", salt=1))
    assert cli("artifact", "tag", "m:x", one[:20], "--json", *ONLY).document["version"] == 1
    stale = cli("artifact", "tag", "m:x", two, "--expected", two, *ONLY)
    assert stale.code == 1 and "expected" in stale.err
    assert cli("artifact", "tag", "m:x", two, "--expected", one, *ONLY).code == 0
    assert cli("artifact", "tag", "m:y", two, "--force", *ONLY).code == 0
    history = cli("artifact", "tag", "m:x", "--json", *ONLY).document["tags"]
    assert [(t["version"], t["digest"]) for t in history] == [(2, two), (1, one)]
    assert len(cli("artifact", "tag", "--json", *ONLY).document["tags"]) == 2
    assert cli("artifact", "show", "m", "--json", *ONLY).document["digest"] == two, "the newest"
    assert cli("artifact", "show", "sha256:000000000000", *ONLY).code == 1
    assert cli("artifact", "show", "sha256:zz", *ONLY).code == 2
    for wrong in (two[:8], two[:10], "sha256:ABCDEF", "sha256:xyzxyz"):
        short = cli("artifact", "show", wrong, *ONLY)
        assert short.code == 2 and "at least 4 lower-case hex digits" in short.err
    assert cli("artifact", "show", two[:11], "--json", *ONLY).document["digest"] == two


def test_a_tag_is_taken_away_and_shows_where_it_has_pointed(
    cli: Terminal, world: World, folder: Path
) -> None:
    argv = ("artifact", "publish", str(folder), "--model", "m", "--tag", "m:x", "--json", *GIVEN)
    digest = cli(*argv).document["digest"]
    stale = cli("artifact", "untag", "m:x", "--expected", "sha256:" + "0" * 64, *ONLY)
    assert stale.code == 1
    gone = cli("artifact", "untag", "m:x", "--json", *ONLY)
    assert gone.code == 0 and gone.document == {"name": "m:x", "version": 2, "was": digest}
    second = cli("artifact", "untag", "m:x", "--expected", digest, *ONLY)
    assert second.code == 1 and "no such tag" in second.err, "it does not point there any more"
    again = cli("artifact", "untag", "m:x", *ONLY)
    assert again.code == 0 and "which pointed nowhere" in again.out
    assert cli("artifact", "tag", "--json", *ONLY).document["tags"] == []
    assert "taken away" in cli("artifact", "tag", "m:x", *ONLY).out
    assert cli("artifact", "show", "m:x", *ONLY).code == 1
    assert cli("artifact", "untag", "m:none", *ONLY).code == 1


def test_verify_reads_every_byte(cli: Terminal, world: World, folder: Path) -> None:
    argv = ("artifact", "publish", str(folder), "--model", "m", "--json", *GIVEN)
    digest = cli(*argv).document["digest"]
    good = cli("artifact", "verify", "m", "--json", *GIVEN)
    assert good.code == 0 and good.document["ok"] is True and len(good.document["files"]) == 5
    blob = max(world.blobs.root.rglob("sha256/**/*"), key=lambda p: p.stat().st_size * p.is_file())
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    bad = cli("artifact", "verify", digest, *GIVEN)
    assert bad.code == 1 and ".safetensors" in bad.err and "publish it again" in bad.err
    assert len(re.findall(r" ok\s*$", bad.out, re.MULTILINE)) == 4


def test_artifacts_of_an_unknown_model_are_no_empty_list(
    cli: Terminal, world: World, tmp_path: Path
) -> None:
    none = cli("artifact", "list", "--model", "nosuch", *ONLY)
    assert (none.code, none.out) == (1, "") and "none is" in none.err
    folder = model_folder(tmp_path / "m")
    assert cli("artifact", "publish", str(folder), "--model", "demo", *GIVEN).code == 0
    said = cli("artifact", "list", "--model", "nosuch", "--json", *ONLY)
    assert (said.code, said.out) == (1, "")
    assert "model 'nosuch' is not known; published are demo" in said.err
    other = cli("artifact", "list", "--model", "demo", "--kind", "engine", "--json", *ONLY)
    assert (other.code, other.document) == (0, {"artifacts": []}), "known, and none of that kind"


def test_a_key_signs_what_is_published_and_show_says_so(
    cli: Terminal, world: World, folder: Path, tmp_path: Path
) -> None:
    key = tmp_path / "release.pem"
    made = cli("artifact", "key", "new", str(key), "--json").document
    assert key.stat().st_mode & 0o777 == 0o600 and (tmp_path / "release.pem.pub").exists()
    again = cli("artifact", "key", "new", str(key))
    assert again.code == 1 and "one is there" in again.err, "a key is never overwritten"
    public = base64.b64decode(made["public_key"])
    world.trust = TrustPolicy(
        {"release": TrustKey("release", public)}, {"m": ModelTrust(TrustMode.REQUIRE)}
    )
    cli("artifact", "publish", str(folder), "--model", "m", "--tag", "m:1", *GIVEN)
    refused = cli("artifact", "show", "m", *ONLY)
    assert refused.code == 1 and made["key_id"] in refused.err
    assert cli("artifact", "show", "m:1", "--json", *ONLY).document["signatures"] == []
    signed = cli("artifact", "sign", "m:1", "--key", str(key), "--json", *ONLY).document
    assert signed["created"] and signed["key_id"] == made["key_id"]
    assert not cli("artifact", "sign", "m:1", "--key", str(key), "--json", *ONLY).document[
        "created"
    ]
    assert made["key_id"] in cli("artifact", "show", "m", *ONLY).out
    again = cli("artifact", "publish", str(folder), "--model", "m", "--sign-key", str(key), *GIVEN)
    assert f"signed by {made['key_id']}" in again.out


@pytest.mark.parametrize("spoil", ["open", "not a key", "gone"])
def test_a_key_that_cannot_be_used_is_refused(cli: Terminal, tmp_path: Path, spoil: str) -> None:
    key = tmp_path / "k.pem"
    cli("artifact", "key", "new", str(key))
    if spoil == "open":
        key.chmod(0o644)
    elif spoil == "not a key":
        key.write_text("words")
    else:
        key.unlink()
    found = cli("artifact", "sign", "m:1", "--key", str(key), *ONLY)
    assert found.code == 2 and "k.pem" in found.err


def test_gc_says_what_would_go_then_takes_it(cli: Terminal, world: World, folder: Path) -> None:
    argv = ("artifact", "publish", str(folder), "--model", "m", *GIVEN)
    cli(*argv)
    old = next(iter(world.blobs.root.glob("sha256/*/*")))
    (folder / "README.md").write_text("second")
    cli(*argv, "--tag", "m:2")
    first = cli("artifact", "list", "--json", *ONLY).document["artifacts"][-1]["digest"]
    foreseen = cli("artifact", "gc", "--dry-run", "--json", *GIVEN[2:]).document
    assert foreseen["dry_run"] and foreseen["retired"] == [first] and foreseen["evicted"] == []
    done = cli("artifact", "gc", *GIVEN[2:])
    assert done.code == 0 and "1 artifacts retired" in done.out and "m:2 points at it" in done.out
    assert old.exists(), "the second one needs all files of the first"
    held = cli("artifact", "retire", "m:2", *GIVEN)
    assert held.code == 1 and "tag m:2 points at it" in held.err
    assert first not in str(cli("artifact", "list", "--json", *ONLY).document)
    assert "already retired" in cli("artifact", "retire", first, *GIVEN).out
