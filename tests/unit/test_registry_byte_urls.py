"""`--blob-store`: which URLs are understood, what is refused, and that no credential is repeated."""

from pathlib import Path
from typing import Any

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from readyplane.core.errors import InvalidField
from readyplane.core.startup import WeightTier
from readyplane.kit.clock import SystemClock
from readyplane_registry.blob_objects import ObjectBlobs
from readyplane_registry.blob_urls import StoreUrl, open_store, parse_store_url
from readyplane_registry.blobs import ByteStore

SECRET = "hunter2-abc"


def opened(url: str) -> ByteStore:
    return open_store(url, clock=SystemClock(), random=lambda: 0.5)


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("file:///var/blobs/", StoreUrl("file", prefix="/var/blobs"), "file:///var/blobs"),
        ("mount:///mnt/a%20b", StoreUrl("mount", prefix="/mnt/a b"), "mount:///mnt/a b"),
        ("s3://models", StoreUrl("s3", "models"), "s3://models"),
        ("gs://models/a/b/", StoreUrl("gs", "models", "a/b"), "gs://models/a/b"),
        (
            "s3://models/x?endpoint=http://127.0.0.1:9000&region=eu-west-1&path_style=false",
            StoreUrl(
                "s3", "models", "x",
                {"endpoint": "http://127.0.0.1:9000", "region": "eu-west-1", "path_style": "false"},
            ),
            "s3://models/x",
        ),
        (
            "az://models/x?account=acme",
            StoreUrl("az", "models", "x", {"account": "acme"}),
            "az://models/x",
        ),
    ],
)  # fmt: skip
def test_a_url_is_read_and_named_without_its_options(text: str, url: StoreUrl, name: str) -> None:
    assert parse_store_url(text) == url and url.name == name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "give file:///"),
        ("/var/blobs", "give file:///"),
        ("https://models.example", "give file:///"),
        ("file://host/x", "ABSOLUTE/FOLDER"),
        ("file:///", "ABSOLUTE/FOLDER"),
        ("s3://ab", "3 to 63 letters"),
        ("s3:///x", "3 to 63 letters"),
        ("s3://models/a/../b", "without empty parts"),
        ("s3://models?regoin=x", "options of s3: endpoint, region, path_style"),
        ("s3://models?region=a&region=b", "each once"),
        ("s3://models?region=", "each once"),
        ("gs://models?region=x", "options of gs: none"),
        ("s3://models?endpoint=ftp://x", "endpoint=http://HOST:PORT"),
        ("s3://models?endpoint=http://x/path", "endpoint=http://HOST:PORT"),
        ("s3://models?path_style=yes", "path_style=true or false"),
        ("s3://models#x", "leave out what follows"),
        (f"s3://key:{SECRET}@models/x", "leave credentials to the environment"),
        (f"s3://models?secret_access_key={SECRET}", "leave credentials to the environment"),
        (f"az://models?sas_token={SECRET}", "leave credentials to the environment"),
        (f"s3://models?endpoint=http://u:{SECRET}@x", "endpoint=http://HOST:PORT"),
        (f"ftp://u:{SECRET}@x/?key={SECRET}", "give file:///"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_remedy(text: str, told: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_store_url(text)
    assert told in str(caught.value) and caught.value.field == "blob_store"
    assert SECRET not in str(caught.value)


def test_each_cloud_is_opened_by_one_library_with_its_own_retries_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GCS and Azure are tested by their configuration only: nothing here serves their protocols."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
    for url, kind in [
        ("s3://models/x?region=eu-west-1", S3Store),
        ("gs://models/x", GCSStore),
        ("az://models/x?account=acme", AzureStore),
    ]:
        store = opened(url)
        assert isinstance(store, ObjectBlobs) and isinstance(store._store, kind)
        assert store.tier is WeightTier.L4_OBJECT and store.name == url.partition("?")[0]
        library: Any = store._store
        assert library.prefix == "x" and library.retry_config["max_retries"] == 0


def test_what_the_library_refuses_names_the_setting() -> None:
    with pytest.raises(InvalidField, match="az://models"):
        opened("az://models")


def test_a_mount_is_a_folder_in_the_rack(tmp_path: Path) -> None:
    assert opened(f"mount://{tmp_path}/x").tier is WeightTier.L3_RACK
    assert (tmp_path / "x" / "sha256").is_dir()
