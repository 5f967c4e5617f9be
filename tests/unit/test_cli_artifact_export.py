"""`readyplane artifact export`: an OCI layout that any tool reads, verified and the same everywhere."""

import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from readyplane.core.errors import IdentityMismatch, InvalidField
from readyplane.core.identity import FileEntry, Manifest
from readyplane_registry.ingest import build_manifest
from readyplane_registry.oci import layout_of
from readyplane_registry.oci_export import export
from tests.registry_data import document, model_folder
from tests.unit.cli_world import Terminal, clean_environment, stand_in

GIVEN = ("--registry", "127.0.0.1:1", "--registry-http", "http://127.0.0.1:2")


class Source:
    """The bytes of a folder, and how often they were asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, [""]
        self.wrong = b""

    async def read(self, entry: FileEntry) -> AsyncIterator[bytes]:
        self.asked.append(entry.path)
        data = (self.folder / entry.path).read_bytes()
        yield data[:100]
        yield self.wrong or data[100:]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


@pytest.fixture
def manifest(model: Path) -> Manifest:
    return build_manifest(model, model="m")[0]


def blob(folder: Path, digest: str) -> bytes:
    data = (folder / "blobs" / "sha256" / digest.removeprefix("sha256:")).read_bytes()
    assert "sha256:" + hashlib.sha256(data).hexdigest() == digest
    return data


async def test_a_layout_holds_every_file_as_a_raw_layer(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    layout, fetched = await export(manifest, out, read=Source(model).read, name="m:1")
    assert fetched == manifest.size_bytes
    assert json.loads((out / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    (listed,) = json.loads((out / "index.json").read_bytes())["manifests"]
    assert listed["digest"] == layout.digest
    assert listed["annotations"] == {"org.opencontainers.image.ref.name": "m:1"}
    image = json.loads(blob(out, layout.digest))
    assert image["artifactType"] == "application/vnd.cnai.model.manifest.v1+json"
    assert image["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    layers = {layer["annotations"]["org.cnai.model.filepath"]: layer for layer in image["layers"]}
    for entry in manifest.files:
        assert layers[entry.path]["digest"] == entry.sha256
        assert layers[entry.path]["size"] == entry.size_bytes
        assert blob(out, entry.sha256) == (model / entry.path).read_bytes()
    kinds = {path: layer["mediaType"].rpartition("model.")[2] for path, layer in layers.items()}
    assert kinds["model-00001-of-00002.safetensors"] == "weight.v1.raw"
    assert kinds["config.json"] == kinds["tokenizer.json"] == "weight.config.v1.raw"
    own = layers[".readyplane/manifest.json"]
    assert own["digest"] == manifest.digest, "with the chunk checksums that OCI does not know"
    assert Manifest.from_document(json.loads(blob(out, own["digest"]))) == manifest
    config = json.loads(blob(out, image["config"]["digest"]))
    assert config["modelfs"] == {
        "type": "layers",
        "diff_ids": [layer["digest"] for layer in image["layers"]],
    }
    assert config["descriptor"]["name"] == "m" and config["config"]["format"] == "safetensors"


async def test_the_same_artifact_gives_the_same_bytes_and_is_not_read_twice(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    source = Source(model)
    for name in ("a", "b", "a"):
        await export(manifest, tmp_path / name, read=source.read)
    left, right = (
        {
            p.relative_to(tmp_path / n): p.read_bytes()
            for p in (tmp_path / n).rglob("*")
            if p.is_file()
        }
        for n in ("a", "b")
    )
    assert left == right
    assert len(source.asked) - 1 == 2 * len(manifest.files), "the third time nothing was read"


async def test_wrong_bytes_are_no_layout_and_what_was_there_is_not_believed(
    model: Path, manifest: Manifest, tmp_path: Path
) -> None:
    out, source = tmp_path / "out", Source(model)
    source.wrong = b"<html>"
    with pytest.raises(IdentityMismatch, match=r"bytes with sha256:.* came, not sha256:"):
        await export(manifest, out, read=source.read)
    assert not (out / "index.json").exists()
    assert list((out / "blobs/sha256").iterdir()) == []
    source.wrong = b""
    await export(manifest, out, read=source.read)
    held = out / "blobs/sha256" / manifest.files[0].sha256.removeprefix("sha256:")
    held.write_bytes(b"changed")
    await export(manifest, out, read=source.read)
    assert blob(out, manifest.files[0].sha256)
    (out / "mine.txt").write_text("x")
    with pytest.raises(InvalidField, match=r"mine\.txt"):
        await export(manifest, out, read=source.read)


def test_what_is_not_known_is_left_out_of_the_config() -> None:
    layout = layout_of(Manifest.from_document(document("m", quantisation="none")))
    image = json.loads(layout.documents[layout.digest])
    config = json.loads(layout.documents[image["config"]["digest"]])
    assert config["config"] == {"format": "safetensors", "precision": "u8"}
    assert "annotations" not in json.loads(layout.index)["manifests"][0]


def test_the_command_tells_both_digests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    clean_environment(monkeypatch, tmp_path / "state")
    cli = Terminal(capfd)
    manifest = Manifest.from_document(document("m"))

    class Registry:
        async def list_tags(self, name: str = "") -> list[Any]:
            return []

        async def list_manifests(self, **_asked: str) -> list[Any]:
            return []

        async def resolve(self, reference: str, **_need: Any) -> Manifest:
            return manifest

        async def get_manifest(self, digest: str) -> Manifest:
            return manifest

        async def aclose(self) -> None:
            """Nothing is open."""

    async def stored(where: Any, digest: str, entry: FileEntry) -> AsyncIterator[bytes]:
        assert (where.registry_http, digest) == ("http://127.0.0.1:2", manifest.digest)
        yield b"\1" * entry.size_bytes

    stand_in(monkeypatch, "RegistryClient", Registry())
    monkeypatch.setattr("readyplane_lab.cli.artifact_export.stored_bytes", stored)
    out = tmp_path / "out"
    argv = ("artifact", "export", "m", "--oci", str(out), *GIVEN)
    told = cli(*argv, "--json").document
    assert told["digest"] == manifest.digest and told["fetched_bytes"] == 100
    assert told["oci_digest"] == layout_of(manifest).digest
    assert told["oci_digest"] in cli(*argv).out
    assert cli("artifact", "export", "m", *GIVEN).code == 2
