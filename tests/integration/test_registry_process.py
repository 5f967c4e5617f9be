"""The registry as a process: gRPC, REST and bytes over real stores, killed and started again."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from readyplane.client import RegistryClient
from readyplane.core.errors import InvalidField, ReadyplaneError
from readyplane.core.identity import chunk_hash
from readyplane.wire import error_from_document
from readyplane_lab.cli.artifact_export import stored_bytes
from readyplane_lab.cli.where import Where
from readyplane_registry.__main__ import Settings, main
from readyplane_registry.ingest import Facts, Published, RemoteBlobs, publish_directory
from readyplane_registry.oci_export import export
from tests.registry_data import document, model_folder, sha256

START_S_MAX = 120.0
TOKEN = "a-token-of-the-test"


@dataclass
class Process:
    """One running registry and what it told of itself."""

    popen: subprocess.Popen[bytes]
    grpc: str
    http: str

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.popen.send_signal(number)
        return self.popen.wait(60)


@dataclass
class Place:
    """Where registries of this module keep their things."""

    database_url: str
    redis_url: str
    folder: Path

    def start(self, *flags: str) -> Process:
        ready = self.folder / f"ready-{os.urandom(4).hex()}.json"
        arguments = {
            "--database-url": self.database_url,
            "--redis-url": self.redis_url,
            "--blob-dir": str(self.folder / "blobs"),
            "--ready-file": str(ready),
        }
        if "--blob-store" in flags:
            del arguments["--blob-dir"]
        command = [sys.executable, "-m", "readyplane_registry", *flags]
        command += [part for pair in arguments.items() for part in pair]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("READYPLANE_")}
        with (self.folder / "log").open("ab") as log:
            popen = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        waited = threading.Event()
        for _ in range(int(START_S_MAX / 0.05)):
            if ready.exists():
                told = json.loads(ready.read_text())
                return Process(popen, told["grpc"], told["http"])
            if popen.poll() is not None:
                break
            waited.wait(0.05)
        popen.kill()
        raise AssertionError((self.folder / "log").read_text())


@pytest.fixture(scope="module")
def place(database_url: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(database_url, redis_url, tmp_path_factory.mktemp("registry"))


@pytest.fixture(scope="module")
def process(place: Place) -> Iterator[Process]:
    running = place.start()
    yield running
    assert running.stop() == 0


@pytest.fixture
async def rest(process: Process) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=process.http, timeout=30, trust_env=False) as client:
        yield client


@pytest.fixture
async def rpc(process: Process) -> AsyncIterator[RegistryClient]:
    client = RegistryClient(process.grpc, timeout_s=30)
    yield client
    await client.aclose()


@pytest.fixture
async def published(process: Process, rpc: RegistryClient, tmp_path: Path) -> Published:
    folder = model_folder(tmp_path / "m", shard_bytes=3_000_000)
    sink = RemoteBlobs(process.http)
    return await publish_directory(
        folder,
        model="served",
        registry=rpc,
        sink=sink,
        tag="served/prod",
        facts=Facts(chunk_bytes=1_000_000),
    )


async def test_a_folder_is_published_served_and_verified(
    published: Published,
    rpc: RegistryClient,
    rest: httpx.AsyncClient,
    process: Process,
    tmp_path: Path,
) -> None:
    again = await publish_directory(
        tmp_path / "m",
        model="served",
        registry=rpc,
        sink=RemoteBlobs(process.http),
        facts=Facts(chunk_bytes=1_000_000),
    )
    assert (again.digest, again.created, again.uploaded_bytes) == (published.digest, False, 0)
    plan = await rpc.plan_fetch(published.digest, worker_id="w", incarnation="i", node="n")
    (storage,) = plan.sources
    manifest = await rpc.get_manifest(published.digest)
    for entry in manifest.files:
        url = f"{storage.source.url}/{quote(entry.path)}"
        pieces = []
        for place_, begin in enumerate(range(0, entry.size_bytes, manifest.chunk_bytes)):
            end = min(entry.size_bytes, begin + manifest.chunk_bytes)
            answer = await rest.get(url, headers={"range": f"bytes={begin}-{end - 1}"})
            assert answer.status_code == 206
            assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/{entry.size_bytes}"
            assert chunk_hash(answer.content) == entry.chunks[place_]
            pieces.append(answer.content)
        assert sha256(b"".join(pieces)) == entry.sha256
    answer = await rest.post(f"/v1/artifacts/{published.digest}/verify")
    assert answer.json()["ok"] is True and len(answer.json()["files"]) == len(manifest.files)


async def test_ranges(published: Published, rest: httpx.AsyncClient, tmp_path: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    data = (tmp_path / "m" / name).read_bytes()
    url = f"/v1/blobs/{published.digest}/{name}"
    whole = await rest.get(url)
    etag = f'"{sha256(data)}"'
    assert (whole.status_code, whole.content, whole.headers["etag"]) == (200, data, etag)
    assert whole.headers["accept-ranges"] == "bytes"
    head = await rest.head(url)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(data))
    last = len(data) - 1
    for header, want in {
        "bytes=0-0": data[:1],
        "bytes=5-9": data[5:10],
        f"bytes={last}-": data[last:],
        "bytes=-7": data[-7:],
        f"bytes=-{10**9}": data,
        f"bytes=10-{10**15}": data[10:],
        "Bytes = 1-2": data[1:3],
    }.items():
        answer = await rest.get(url, headers={"range": header})
        assert (answer.status_code, answer.content) == (206, want), header
        assert answer.headers["content-length"] == str(len(want))
    for header in (f"bytes={len(data)}-", "bytes=-0", f"bytes={10**12}-{10**12 + 1}"):
        answer = await rest.get(url, headers={"range": header})
        assert answer.status_code == 416, header
        assert answer.headers["content-range"] == f"bytes */{len(data)}"
    for header in ("bytes=9-5", "bytes=a-b", "bytes=", "lines=1-2", "bytes=1-2,4-5", "bytes=--1"):
        answer = await rest.get(url, headers={"range": header})
        assert (answer.status_code, len(answer.content)) == (200, len(data)), header
    ranged = {"range": "bytes=0-4"}
    assert (await rest.get(url, headers={**ranged, "if-range": etag})).status_code == 206
    assert (await rest.get(url, headers={**ranged, "if-range": '"other"'})).status_code == 200
    assert (await rest.get(url, headers={"if-none-match": etag})).status_code == 304


async def test_a_client_that_leaves_in_the_middle_holds_nothing_up(
    published: Published, rest: httpx.AsyncClient, process: Process
) -> None:
    url = f"/v1/blobs/{published.digest}/model-00001-of-00002.safetensors"
    open_files = Path(f"/proc/{process.popen.pid}/fd")
    before = len(list(open_files.iterdir()))
    for _ in range(20):
        async with rest.stream("GET", url) as answer:
            async for _piece in answer.aiter_raw(1000):
                break
    for _ in range(100):
        if len(list(open_files.iterdir())) <= before + 1:
            break
        await asyncio.sleep(0.05)
    assert len(list(open_files.iterdir())) <= before + 1
    assert (await rest.get(url)).status_code == 200


async def test_uploads_of_other_bytes_leave_nothing(
    rest: httpx.AsyncClient, process: Process, place: Place
) -> None:
    data = os.urandom(3_000_000)
    url = f"/v1/blobs/sha256/{sha256(data).removeprefix('sha256:')}"
    for wrong in (data[:-1], data + b"x", b"", b"x" + data[1:]):
        answer = await rest.put(url, content=wrong)
        assert answer.status_code == 422, answer.text
        assert sha256(wrong) in answer.json()["error"]["message"]
        assert (await rest.get(url)).status_code == 404
    await _broken_upload(process, url, data)
    assert (await rest.get(url)).status_code == 404
    for _ in range(100):
        if not list((place.folder / "blobs" / "tmp").iterdir()):
            break
        await asyncio.sleep(0.05)
    assert list((place.folder / "blobs" / "tmp").iterdir()) == []
    first, second = await rest.put(url, content=data), await rest.put(url, content=data)
    assert (first.status_code, second.status_code) == (201, 200)
    assert (await rest.get(url)).content == data
    for name in ("12", "A" * 64, "..%2f..%2fetc"):
        assert (await rest.put(f"/v1/blobs/sha256/{name}", content=b"")).status_code in {
            404,
            405,
            422,
        }


async def _broken_upload(process: Process, url: str, data: bytes) -> None:
    host, port = process.http.removeprefix("http://").split(":")
    _reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"PUT {url} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode())
    writer.write(data[: len(data) // 2])
    await writer.drain()
    writer.close()


async def test_paths_stay_inside(published: Published, rest: httpx.AsyncClient) -> None:
    """B180."""
    for path in (
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "%2fetc%2fpasswd",
        "config.json%00",
        "nope",
    ):
        answer = await rest.get(f"/v1/blobs/{published.digest}/{path}")
        assert answer.status_code == 404, path
        assert answer.json()["error"]["reason"] == "NotFound"
    answer = await rest.get("/v1/blobs/sha256:12/config.json")
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "digest")


async def _told(work: Any) -> tuple[str, str]:
    with pytest.raises(ReadyplaneError) as caught:
        await work
    return caught.value.reason, str(caught.value)


async def test_rest_and_grpc_tell_the_same_errors(
    published: Published, rpc: RegistryClient, rest: httpx.AsyncClient
) -> None:
    unknown = "sha256:" + "0" * 64
    bad = {**document("bad"), "chunk_bytes": -1}
    orphan = document("orphan", data=b"never uploaded")
    far = {**document("far"), "config": {"max_model_len": 10**400, "vocab_size": 5}}
    tag = {"digest": published.digest}
    cases: list[tuple[int, Any, Any]] = [
        (422, rpc.publish_manifest(bad), rest.post("/v1/artifacts", json={"manifest": bad})),
        (422, rpc.publish_manifest(orphan), rest.post("/v1/artifacts", json={"manifest": orphan})),
        (422, rpc.publish_manifest(far), rest.post("/v1/artifacts", json={"manifest": far})),
        (404, rpc.get_manifest(unknown), rest.get(f"/v1/artifacts/{unknown}")),
        (422, rpc.get_manifest("sha256:1"), rest.get("/v1/artifacts/sha256:1")),
        (404, rpc.resolve("nobody"), rest.get("/v1/resolve?reference=nobody")),
        (422, rpc.resolve("x", kind="y"), rest.get("/v1/resolve?reference=x&kind=y")),
        (
            422,
            rpc.resolve("served", need={"tp": "2", "layout": "x"}),
            rest.get("/v1/resolve?reference=served&need=tp=2&need=layout=x"),
        ),
        (
            422,
            rpc.resolve("served", need={"x": "1"}),
            rest.get("/v1/resolve?reference=served&need=x=1"),
        ),
        (422, rpc.set_tag("a b", published.digest), rest.put("/v1/tags/a%20b", json=tag)),
        (404, rpc.set_tag("t", unknown), rest.put("/v1/tags/t", json={"digest": unknown})),
        (404, rpc.list_tags("none"), rest.get("/v1/tags/none")),
        (422, rpc.list_manifests(kind="x"), rest.get("/v1/artifacts?kind=x")),
    ]
    for status, called, asked in cases:
        reason, message = await _told(called)
        answer = await asked
        assert answer.status_code == status, answer.text
        error = error_from_document(answer.json())
        assert (error.reason, str(error)) == (reason, message)


async def test_rest_refuses_what_only_rest_can_be_sent(rest: httpx.AsyncClient) -> None:
    post = {"url": "/v1/artifacts", "headers": {"content-type": "application/json"}}
    for content, field in [
        (b"", "manifest"),
        (b"[]", "manifest"),
        (b'{"manifest":{}}', "manifest.schema"),
        (b'{"manifest":[]}', "manifest"),
        (b'{"manifest":{},"bytes_elsewhere":"yes"}', "bytes_elsewhere"),
        (b'{"manifest":{},"x":1}', "x"),
        (b'{"manifest":{"model":"a","model":"b"}}', "manifest.model"),
    ]:
        answer = await rest.post(content=content, **post)  # type: ignore[arg-type]
        assert answer.status_code == 422, content
        assert answer.json()["error"]["field"] == field, answer.text
    for body in ({"digest": 3}, {"digest": "x", "force": "yes"}, {"digest": "x", "y": 1}, {}):
        answer = await rest.put("/v1/tags/t", json=body)
        assert answer.status_code == 422 and answer.json()["error"]["field"], body
    for query in ("page_size=0", "page_size=-1", "page_size=x", "page_token=-1", "page_token=²"):
        assert (await rest.get(f"/v1/artifacts?{query}")).status_code == 422, query


async def test_lists_tags_and_plans_over_rest(
    published: Published, rest: httpx.AsyncClient
) -> None:
    page = (await rest.get("/v1/artifacts?model=served&page_size=1")).json()
    (line,) = page["artifacts"]
    assert line["digest"] == published.digest and line["tags"] == ["served/prod"]
    shown = (await rest.get(f"/v1/artifacts/{published.digest}")).json()
    assert shown["manifest"]["model"] == "served" and shown["created_s"] > 1.6e9
    tag = (await rest.get("/v1/tags/served/prod")).json()
    assert tag["digest"] == published.digest and tag["history"][0]["version"] == tag["version"]
    assert any(t["name"] == "served/prod" for t in (await rest.get("/v1/tags")).json()["tags"])
    found = (await rest.get("/v1/resolve?reference=served/prod")).json()
    assert found["digest"] == published.digest
    url = "/v1/resolve?reference=served&need=tp=2&candidates=1"
    missed = (await rest.get(url)).json()
    (nearest,) = missed["candidates"]
    assert missed["artifact"] is None and nearest["digest"] == published.digest
    assert nearest["differing"] == [{"field": "tp", "needed": "2", "found": "1"}]
    met = (await rest.get("/v1/resolve?reference=served&need=tp=1&candidates=1")).json()
    assert met["artifact"]["digest"] == published.digest and met["candidates"] == []
    plan = (await rest.get(f"/v1/artifacts/{published.digest}/plan?worker_id=w")).json()
    assert plan["sources"][0]["source_id"] == "storage:registry" and plan["sources"][0]["why"]
    described = (await rest.get("/openapi.json")).json()["paths"]
    assert {"/v1/artifacts", "/v1/tags/{name}", "/v1/resolve", "/v1/blobs/{digest}/{path}"} <= {
        path.replace(":path", "") for path in described
    }
    metrics = (await rest.get("/metrics")).text
    assert "readyplane_registry_served_bytes_total" in metrics
    assert 'readyplane_registry_publishes_total{outcome="created"}' in metrics


async def _race(rpc: RegistryClient, other: RegistryClient) -> None:
    """Two registries share their stores, and of many writers of one tag one wins each round."""
    digests = [
        (await rpc.publish_manifest(document("race", salt=str(i)), bytes_elsewhere=True))[0]
        for i in range(6)
    ]
    assert (await other.get_manifest(digests[0])).digest == digests[0]
    held = ""
    for _round in range(5):
        answers = await asyncio.gather(
            *(
                who.set_tag("race", digest, expected_digest=held)
                for who, digest in zip([rpc, other] * 3, digests, strict=True)
                if digest != held
            ),
            return_exceptions=True,
        )
        won = [a for a in answers if not isinstance(a, BaseException)]
        assert len(won) == 1
        held = won[0].digest
    versions = [tag.version for tag in await other.list_tags("race")]
    assert versions == [5, 4, 3, 2, 1]


async def test_a_second_registry_shares_the_stores_and_what_it_published_outlives_a_kill(
    place: Place, rpc: RegistryClient, tmp_path: Path
) -> None:
    first = place.start()
    client = RegistryClient(first.grpc, timeout_s=30)
    await _race(rpc, client)
    folder = model_folder(tmp_path / "kept", salt=9)
    kept = await publish_directory(
        folder, model="kept", registry=client, sink=RemoteBlobs(first.http), tag="kept/prod"
    )
    await client.aclose()
    await _broken_upload(first, "/v1/blobs/sha256/" + "e" * 64, b"x" * 3_000_000)
    first.stop(signal.SIGKILL)
    assert first.popen.returncode == -signal.SIGKILL
    again = place.start("--token", TOKEN)
    client = RegistryClient(again.grpc, TOKEN, timeout_s=30)
    try:
        assert (await client.resolve("kept/prod")).digest == kept.digest
        assert [t.version for t in await client.list_tags("kept/prod")] == [1]
        async with httpx.AsyncClient(base_url=again.http, timeout=30, trust_env=False) as rest:
            allowed = {"authorization": f"Bearer {TOKEN}"}
            answer = await rest.post(f"/v1/artifacts/{kept.digest}/verify", headers=allowed)
            assert answer.json()["ok"] is True
            await _only_the_token_opens(rest)
        assert list((place.folder / "blobs" / "tmp").iterdir()) == []
    finally:
        await client.aclose()
        assert again.stop() == 0


async def _only_the_token_opens(rest: httpx.AsyncClient) -> None:
    blob = "/v1/blobs/sha256/" + "0" * 64
    for path in ("/v1/tags", blob):
        assert (await rest.get(path)).status_code == 401
    assert (await rest.put(blob, content=b"")).status_code == 401
    assert (await rest.get("/readyz")).status_code == 200
    url = str(rest.base_url)
    assert await RemoteBlobs(url, token=TOKEN).has(sha256(b"never"), 5) is False
    upload = RemoteBlobs(url).put_file(sha256(b""), Path(os.devnull))
    assert (await _told(upload))[0] == "Unauthenticated"


async def test_an_object_store_holds_the_bytes_and_the_registry_serves_their_ranges(
    place: Place, s3_url: str, tmp_path: Path
) -> None:
    running = place.start("--blob-store", s3_url, "--storage-name", "s3")
    rpc = RegistryClient(running.grpc, timeout_s=30)
    try:
        async with httpx.AsyncClient(base_url=running.http, timeout=30, trust_env=False) as rest:
            done = await publish_directory(
                model_folder(tmp_path / "m", salt=7, shard_bytes=3_000_000), model="in-s3",
                registry=rpc, sink=RemoteBlobs(running.http), facts=Facts(chunk_bytes=1_000_000),
            )  # fmt: skip
            plan = await rpc.plan_fetch(done.digest, worker_id="w", incarnation="i", node="n")
            assert [r.source.source_id for r in plan.sources] == ["storage:s3"]
            entry = max(done.manifest.files, key=lambda file: file.size_bytes)
            url = f"{plan.sources[0].source.url}/{quote(entry.path)}"
            whole = await rest.get(url)
            assert sha256(whole.content) == entry.sha256
            part = await rest.get(url, headers={"range": "bytes=1000001-1000009"})
            assert part.status_code == 206 and part.content == whole.content[1000001:1000010]
            beyond = await rest.get(url, headers={"range": "bytes=99999999-"})
            assert beyond.status_code == 416
            head = await rest.head(url)
            assert head.headers["content-length"] == str(entry.size_bytes) and not head.content
            sent = await rest.get(url, params={"redirect": "allow"})
            assert sent.status_code == 307 and "X-Amz-Signature" in sent.headers["location"]
            direct = await rest.get(sent.headers["location"], headers={"range": "bytes=5-8"})
            assert direct.status_code == 206 and direct.content == whole.content[5:9]
            answer = await rest.post(f"/v1/artifacts/{done.digest}/verify")
            assert answer.json()["ok"] is True
            where = Where(registry_http=running.http)
            _layout, read = await export(
                done.manifest, tmp_path / "oci",
                read=lambda entry: stored_bytes(where, done.digest, entry),
            )  # fmt: skip
            assert read == done.manifest.size_bytes
            absent = await rest.get(f"/v1/blobs/sha256/{'0' * 64}")
            assert absent.status_code == 404
            wrong = await rest.put(f"/v1/blobs/sha256/{'0' * 64}", content=b"<html>no</html>")
            assert wrong.status_code == 422 and "an HTML page" in wrong.text
    finally:
        await rpc.aclose()
        assert running.stop() == 0
    assert "readyplane-test-secret" not in (place.folder / "log").read_text()


def test_a_wrong_setting_is_one_clear_line(place: Place) -> None:
    command = [sys.executable, "-m", "readyplane_registry", "--blob-dri", "x"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.count("\n") == 1 and "did you mean --blob-dir" in ended.stderr


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"blob_dir": Path("/proc/nowhere")}, "blob_dir"),
        ({"blob_dir": None}, "blob_dir"),
        ({"blob_store": "s3://models"}, "blob_dir"),
        ({"blob_dir": None, "blob_store": "s3://models?regoin=x"}, "blob_store"),
        ({"database_url": "mysql://x/y"}, "database_url"),
        ({"redis_url": ""}, "redis_url"),
        ({"redis_url": "http://x"}, "redis_url"),
    ],
)
async def test_each_setting_is_named_when_it_is_wrong(
    place: Place, change: dict[str, Any], field: str
) -> None:
    given: dict[str, Any] = {
        "database_url": place.database_url,
        "redis_url": place.redis_url,
        "blob_dir": place.folder / "blobs",
    }
    with pytest.raises(InvalidField) as caught:
        await main(Settings(**(given | change)))
    assert caught.value.field == field
