"""Flags over variables over defaults, and an error that names what to write instead."""

from pathlib import Path

import pytest
from pydantic import Field

from readyplane.core.errors import InvalidField, UnknownField
from readyplane.kit.settings import ServiceSettings, parse_settings


class ThingSettings(ServiceSettings):
    blob_dir: Path = Field(default=Path("blobs"), description="100 % of the bytes")
    ttl_s: float = Field(default=5.0, gt=0)
    eager: bool = False
    peers: tuple[str, ...] = ()
    limit: int | None = None


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ThingSettings.model_fields:
        monkeypatch.delenv(f"READYPLANE_{name.upper()}", raising=False)


def parse(*argv: str) -> ThingSettings:
    return parse_settings(ThingSettings, argv, "thing", "A thing")


def test_defaults() -> None:
    found = parse()
    assert (found.host, found.grpc_port, found.ttl_s, found.eager) == ("127.0.0.1", 0, 5.0, False)
    assert (found.ready_file, found.peers, found.limit) == (None, (), None)


def test_a_flag_beats_a_variable_beats_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READYPLANE_TTL_S", "7")
    monkeypatch.setenv("READYPLANE_EAGER", "true")
    assert (parse().ttl_s, parse().eager) == (7.0, True)
    found = parse("--ttl-s", "9", "--no-eager", "--blob-dir", "/x", "--limit=3")
    assert (found.ttl_s, found.eager, found.blob_dir, found.limit) == (9.0, False, Path("/x"), 3)


def test_a_variable_of_another_service_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("READYPLANE_ORDERED_AT_MONOTONIC_S", "12.5")
    monkeypatch.setenv("READYPLANE_NONSENSE", "x")
    assert parse() == parse()


def test_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse("--peers", "a", "--peers", "b").peers == ("a", "b")
    monkeypatch.setenv("READYPLANE_PEERS", '["c"]')
    assert parse().peers == ("c",)
    monkeypatch.setenv("READYPLANE_PEERS", "c d")
    with pytest.raises(InvalidField, match="JSON"):
        parse()


@pytest.mark.parametrize(
    "argv, field, words",
    [
        (["--ttl-s", "0"], "ttl_s", "greater than 0"),
        (["--ttl-s", "soon"], "ttl_s", "--ttl-s or READYPLANE_TTL_S"),
        (["--grpc-port", "-1"], "grpc_port", "--grpc-port"),
        (["--router", "router"], "router", "host:port"),
        (["--router", ":50"], "router", "host:port"),
        (["--log-level", "x"], "log_level", "debug, info"),
    ],
)
def test_a_value_that_does_not_fit(argv: list[str], field: str, words: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse(*argv)
    assert caught.value.field == field
    assert argv[1] in str(caught.value)
    assert words in str(caught.value)


def test_an_unknown_flag_names_the_nearest() -> None:
    with pytest.raises(UnknownField, match="did you mean --blob-dir"):
        parse("--blobs-dir=/x")
    with pytest.raises(UnknownField, match="thing --help"):
        parse("--zzz")
    with pytest.raises(UnknownField):
        parse("--blob", "/x")  # no abbreviations: a later flag could change what they mean


def test_a_flag_without_its_value() -> None:
    with pytest.raises(InvalidField, match="--host: expected one argument"):
        parse("--host")


def test_help_lists_every_flag_with_variable_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--help")
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    for name in ThingSettings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
        assert f"READYPLANE_{name.upper()}" in shown
    assert "100 % of the bytes" in " ".join(shown.split())


def test_what_is_needed_is_named() -> None:
    parse("--redis-url", "redis://h/0").need("redis_url")
    with pytest.raises(InvalidField, match="--database-url or READYPLANE_DATABASE_URL"):
        parse("--redis-url", "redis://h/0").need("redis_url", "database_url")


def test_the_token_is_not_shown() -> None:
    assert "s3cret" not in repr(parse("--token", "s3cret"))
