"""A registry as a process that asks for signatures and collects, and publishers that are killed."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from readyplane.client import RegistryClient
from readyplane.core.errors import NotFound, Refused
from readyplane.kit.signing import SigningKey
from tests.integration.test_registry_process import Place, Process
from tests.registry_data import model_folder, safetensors

RUN_S_MAX = 120.0


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "release.pem"
    SigningKey.new(path)
    return path


@pytest.fixture(scope="module")
def place(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(database_url, redis_url, tmp_path_factory.mktemp("trusting"))


@pytest.fixture(scope="module")
def process(place: Place, key: Path) -> Iterator[Process]:
    trust = place.folder / "trust.json"
    public = base64.b64encode(SigningKey.read(key).public_key).decode()
    trust.write_text(
        json.dumps(
            {
                "schema": "readyplane/trust/1",
                "keys": {"release": {"public_key": public}},
                "models": {"vouched": {"mode": "require", "keys": ["release"]}},
            }
        )
    )
    flags = ["--trust-file", str(trust), "--collect-grace-s", "60"]
    flags += ["--keep-untagged-days", "0", "--keep-history-days", "0"]
    running = place.start(*flags)
    yield running
    assert running.stop() == 0


def command(process: Process, *arguments: str) -> list[str]:
    where = ["--registry", process.grpc, "--registry-http", process.http]
    return [sys.executable, "-m", "readyplane_lab.cli", "artifact", *arguments, *where, "--json"]


def run(process: Process, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        command(process, *arguments), capture_output=True, text=True, timeout=RUN_S_MAX, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def test_a_publisher_that_was_killed_goes_on_where_it_was(
    process: Process, place: Place, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    for n in range(16):
        (folder / f"more-{n:02}.safetensors").write_bytes(
            safetensors({f"t{n}": os.urandom(3_000_000)})
        )
    arguments = ("publish", str(folder), "--model", "big", "--tag", "big:1")
    popen = subprocess.Popen(command(process, *arguments), stdout=subprocess.DEVNULL)
    waited = threading.Event()
    blobs = place.folder / "blobs" / "sha256"
    for _ in range(int(RUN_S_MAX / 0.01)):
        if len(list(blobs.glob("*/*"))) >= 3 or popen.poll() is not None:
            break
        waited.wait(0.01)
    popen.send_signal(signal.SIGKILL)
    assert popen.wait(10) == -signal.SIGKILL, "it was killed on its way"
    client = RegistryClient(process.grpc, timeout_s=30)
    try:
        with pytest.raises(NotFound):
            await client.resolve("big")
        done = run(process, *arguments)
        assert done["created"] and 0 < done["uploaded_bytes"] < done["size_bytes"]
        assert (await client.resolve("big:1")).digest == done["digest"]
    finally:
        await client.aclose()


async def test_what_nobody_signed_is_not_resolved_to(
    process: Process, key: Path, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m")
    signer = SigningKey.read(key)
    client = RegistryClient(process.grpc, timeout_s=30)
    try:
        done = run(process, "publish", str(folder), "--model", "vouched", "--tag", "vouched:1")
        for reference in ("vouched", "vouched:1", done["digest"]):
            with pytest.raises(Refused) as caught:
                await client.resolve(reference)
            assert signer.key_id in str(caught.value)
        again = run(process, "publish", str(folder), "--model", "vouched", "--sign-key", str(key))
        assert again["signed_by"] == signer.key_id and again["uploaded_bytes"] == 0
        for reference in ("vouched", "vouched:1", done["digest"]):
            assert (await client.resolve(reference)).digest == done["digest"]
        (folder / "README.md").write_text("newer, and nobody vouches for it")
        newer = run(process, "publish", str(folder), "--model", "vouched")
        assert newer["digest"] != done["digest"]
        assert (await client.resolve("vouched")).digest == done["digest"]
    finally:
        await client.aclose()


def test_collection_keeps_what_is_tagged_and_takes_the_rest(
    process: Process, place: Place, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "m", salt=5)
    old = run(process, "publish", str(folder), "--model", "kept")
    tagged = run(process, "publish", str(model_folder(tmp_path / "n", salt=6)), "--model", "kept",
                 "--tag", "kept:1")  # fmt: skip
    newest = run(process, "publish", str(model_folder(tmp_path / "o", salt=7)), "--model", "kept")
    with httpx.Client(base_url=process.http, timeout=30, trust_env=False) as rest:
        foreseen = rest.post("/v1/collect?dry_run=true").json()
        assert foreseen["dry_run"] and old["digest"] in foreseen["retired"]
        done = rest.post("/v1/collect").json()
        assert old["digest"] in done["retired"]
        kept = {k["digest"]: k["why"] for k in done["kept"]}
        assert "kept:1" in kept[tagged["digest"]] and "newest" in kept[newest["digest"]]
        assert done["evicted"] == [], "bytes outlive the name by the grace"
        shown = rest.get(f"/v1/artifacts/{old['digest']}").json()
        assert shown["retired"] and [e["event"] for e in shown["events"]] == ["retired"]
        assert rest.get(f"/v1/resolve?reference={old['digest']}").status_code == 422
        for digest in (tagged["digest"], newest["digest"]):
            assert rest.post(f"/v1/artifacts/{digest}/verify").json()["ok"]
        assert rest.post(f"/v1/artifacts/{tagged['digest']}/retire").status_code == 422
    again = run(process, "publish", str(folder), "--model", "kept")
    assert again["digest"] == old["digest"] and not again["created"]
