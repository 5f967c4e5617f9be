"""Signatures over a manifest's digest, and the verdict of a policy: tables, by real Ed25519."""

import base64
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from readyplane.core.errors import Conflict, InvalidField, ReadyplaneError
from readyplane.core.trust import (
    PAYLOAD_TYPE,
    ModelTrust,
    Signature,
    TrustKey,
    TrustMode,
    TrustPolicy,
    check_signature,
    key_id,
    payload_of,
    read_envelope,
    read_policy,
    signed_message,
    trusted,
)
from readyplane.kit.signing import SigningKey, TrustFile, seconds_of_rfc3339, verify_ed25519

DIGEST, OTHER = "sha256:" + "a" * 64, "sha256:" + "b" * 64
NOW_S = 1_800_000_000.0


def key_of(seed: int) -> SigningKey:
    return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32))


ONE, TWO = key_of(1), key_of(2)


def signature(key: SigningKey, digest: str = DIGEST) -> Signature:
    return Signature(key.key_id, key.public_key, key.envelope(digest))


def policy(
    mode: TrustMode = TrustMode.REQUIRE, *, threshold: int = 1, **keys: TrustKey
) -> TrustPolicy:
    keys = keys or {"one": TrustKey("one", ONE.public_key), "two": TrustKey("two", TWO.public_key)}
    return TrustPolicy(keys, {"m": ModelTrust(mode, tuple(keys), threshold)})


def verdict(signatures: Any, given: TrustPolicy, model: str = "m", now_s: float = NOW_S) -> Any:
    return trusted(DIGEST, signatures, given, model=model, now_s=now_s, verify=verify_ed25519)


def test_the_envelope_is_golden_and_dsse() -> None:
    """A fixed key and digest, worked out once: other programs can verify what we sign."""
    envelope = json.loads(ONE.envelope(DIGEST))
    assert envelope["payloadType"] == PAYLOAD_TYPE == "application/vnd.readyplane.manifest.v1+json"
    payload = base64.b64decode(envelope["payload"])
    assert payload == b'{"manifest":"' + DIGEST.encode() + b'"}'
    raw = base64.b64decode(envelope["signatures"][0]["sig"])
    message = f"DSSEv1 {len(PAYLOAD_TYPE)} {PAYLOAD_TYPE} {len(payload)} {payload.decode()}"
    Ed25519PrivateKey.from_private_bytes(b"\x01" * 32).public_key().verify(raw, message.encode())
    assert signed_message(payload) == message.encode()
    assert envelope["signatures"][0]["keyid"] == ONE.key_id == (
        "ed25519:34750f98bd59fcfc946da45aaabe933be154a4b5094e1c4abf42866505f3c97e"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("signatures", "given", "allowed", "told"),
    [
        ([signature(ONE)], policy(), True, "signed by one"),
        ([signature(ONE), signature(TWO)], policy(threshold=2), True, "signed by one, two"),
        ([signature(ONE)], policy(threshold=2), False, f"two ({TWO.key_id}): no signature"),
        ([], policy(), False, f"one ({ONE.key_id}): no signature"),
        ([], policy(TrustMode.WARN), True, "no signature"),
        ([], policy(TrustMode.OFF), True, "no signature is asked for"),
        ([signature(key_of(3))], policy(), False, f"signed by {key_of(3).key_id}, which it does"),
        (
            [replace(signature(ONE), envelope=ONE.envelope(OTHER))],
            policy(),
            False,
            "is of sha256:b",
        ),
        ([replace(signature(ONE), envelope=TWO.envelope(DIGEST))], policy(), False, "not verify"),
        ([replace(signature(ONE), envelope="{")], policy(), False, "no readable signature"),
    ],
)
def test_verdicts(signatures: Any, given: TrustPolicy, allowed: bool, told: str) -> None:
    found = verdict(signatures, given)
    assert found.allowed == allowed and told in found.reason, found
    assert found.verified == (allowed and given.of("m").mode is TrustMode.REQUIRE)


def test_a_claimed_public_key_is_no_proof() -> None:
    """Somebody signs with a key of his own and calls it by the trusted key's id."""
    forged = Signature(ONE.key_id, TWO.public_key, TWO.envelope(DIGEST))
    assert not verdict([forged], policy()).allowed
    with pytest.raises(InvalidField, match="keyid"):
        check_signature(DIGEST, ONE.public_key, TWO.envelope(DIGEST), verify_ed25519)


def test_keys_are_rotated_without_a_gap() -> None:
    """The new key signs beside the old one, then the old one is retired; nothing is signed anew."""
    old = TrustKey("old", ONE.public_key, retired_s=NOW_S)
    new = TrustKey("new", TWO.public_key, not_before_s=NOW_S - 100)
    given = policy(old=old, new=new)
    both, only_old = [signature(ONE), signature(TWO)], [signature(ONE)]
    assert "signed by old" in verdict(only_old, given, now_s=NOW_S - 101).reason
    assert "not in force yet" in verdict([signature(TWO)], given, now_s=NOW_S - 101).reason
    assert verdict(both, given, now_s=NOW_S - 1).keys == ("old", "new")
    assert verdict(both, given).keys == ("new",)
    late = verdict(only_old, given)
    assert not late.allowed and "old" in late.reason and "the key is retired" in late.reason


def test_models_without_a_rule_follow_the_default() -> None:
    given = replace(policy(), default=ModelTrust(TrustMode.REQUIRE))
    assert not verdict([], given, model="another").allowed
    assert verdict([signature(TWO)], given, model="another").allowed
    assert verdict([], policy(), model="another").allowed


@given(st.binary(max_size=300) | st.text(max_size=300))
def test_no_envelope_ever_crashes(envelope: bytes | str) -> None:
    try:
        read_envelope(envelope)
    except ReadyplaneError:
        return
    raise AssertionError("noise is no envelope")


@given(st.data())
def test_one_changed_byte_of_an_envelope_never_verifies_as_another(data: st.DataObject) -> None:
    envelope = bytearray(ONE.envelope(DIGEST).encode())
    at = data.draw(st.integers(0, len(envelope) - 1))
    envelope[at] ^= data.draw(st.integers(1, 255))
    changed = bytes(envelope).decode(errors="replace")
    try:
        found = check_signature(DIGEST, ONE.public_key, changed, verify_ed25519)
    except ReadyplaneError:
        return
    # Base64 has spellings of one value: what still verifies says the same.
    assert read_envelope(found.envelope)[:2] == (DIGEST, ONE.key_id)


def trust_document(**fields: Any) -> dict[str, Any]:
    public = base64.b64encode(ONE.public_key).decode()
    return {
        "schema": "readyplane/trust/1",
        "keys": {"one": {"public_key": public, "not_before": "2026-01-01T00:00:00+01:00"}},
        "models": {"m": {"mode": "require", "keys": ["one"]}},
        "default": {"mode": "warn"},
        **fields,
    }


def read(document: Any) -> TrustPolicy:
    return read_policy(document, parse_time=seconds_of_rfc3339)


def test_a_policy_is_read() -> None:
    found = read(trust_document())
    assert found.keys["one"].not_before_s == 1767222000.0
    assert found.of("m") == ModelTrust(TrustMode.REQUIRE, ("one",))
    assert found.of("x") == ModelTrust(TrustMode.WARN)


PUBLIC = {"public_key": base64.b64encode(ONE.public_key).decode()}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"schema": "2"}, "trust.schema"),
        ({"modes": {}}, "trust.modes"),
        ({"keys": []}, "trust.keys"),
        ({"keys": {"one": {"public_key": "AAAA"}}}, "trust.keys.one.public_key"),
        ({"keys": {"one": {"public_key": "%"}}}, "trust.keys.one.public_key"),
        ({"keys": {"one": {**PUBLIC, "retired": "soon"}}}, "trust.keys.one.retired"),
        ({"keys": {"one": {**PUBLIC, "retired": "2026-01-01T00:00:00"}}}, "trust.keys.one.retired"),
        (
            {
                "keys": {
                    "one": {
                        **PUBLIC,
                        "not_before": "2026-12-01T00:00:00Z",
                        "retired": "2026-11-30T23:59:59Z",
                    }
                }
            },
            "trust.keys.one.retired",
        ),
        ({"keys": {"one": {**PUBLIC, "note": "x"}}}, "trust.keys.one.note"),
        ({"keys": {"one": PUBLIC, "again": PUBLIC}}, "trust.keys.again"),
        ({"models": {"m": {"mode": "requires"}}}, "trust.models.m.mode"),
        ({"models": {"m": {}}}, "trust.models.m.mode"),
        ({"models": {"m": {"mode": "require", "keys": ["two"]}}}, "trust.models.m.keys"),
        ({"models": {"m": {"mode": "require", "keys": ["one", "one"]}}}, "trust.models.m.keys"),
        ({"models": {"m": {"mode": "require", "threshold": 2}}}, "trust.models.m.threshold"),
        ({"models": {"m": {"mode": "require", "threshold": True}}}, "trust.models.m.threshold"),
        ({"keys": {}, "models": {}, "default": {"mode": "require"}}, "trust.default.keys"),
    ],
)
def test_a_wrong_policy_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        read(trust_document(**fields))
    assert caught.value.field == field and caught.value.remedy


def test_a_file_is_read_again_and_a_file_that_went_wrong_is_not_passed_over(
    tmp_path: Path,
) -> None:
    file = tmp_path / "trust.json"
    file.write_text(json.dumps(trust_document()))
    held = TrustFile(file)
    assert held.policy() is held.policy(), "read once while it is the same"
    file.write_text(json.dumps(trust_document(default={"mode": "off"})))
    assert held.policy().of("x").mode is TrustMode.OFF
    for spoil in ("{", '{"keys":{},"keys":{}}', ""):
        file.write_text(spoil)
        with pytest.raises(InvalidField):
            held.policy()
    assert TrustFile(None).policy() == TrustPolicy()


def test_a_fifo_or_a_mount_that_hangs_in_its_place_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trust.json"
    text = json.dumps(trust_document())
    file.write_text(text)
    held = TrustFile(file)
    good = held.policy()
    file.unlink()
    os.mkfifo(file)
    assert held.policy() is good and held.policy() is good
    assert [r.levelname for r in caplog.records] == ["ERROR"], "said once"
    assert "no regular file" in str(vars(caplog.records[0])["why"])
    with pytest.raises(InvalidField, match="no regular file"):
        TrustFile(file)

    opened, let_go = os.open, threading.Event()

    def hangs(path: Any, *given: Any, **named: Any) -> int:
        if Path(path) == file:
            let_go.wait(20.0)
        return opened(path, *given, **named)

    monkeypatch.setattr("readyplane.kit.signing.os.open", hangs)
    monkeypatch.setattr("readyplane.kit.signing.LOOK_S_MAX", 0.05)
    before = threading.active_count()
    for _ in range(20):
        assert held.policy() is good
    assert threading.active_count() <= before + 1, "one look at a time"
    file.unlink()
    file.write_text(json.dumps(trust_document(default={"mode": "off"})))
    let_go.set()
    monkeypatch.setattr("readyplane.kit.signing.LOOK_S_MAX", 10.0)
    for thread in threading.enumerate():
        if thread.name == "trust-file":
            thread.join(10.0)
    held.policy()  # what the hung look saw at last
    assert held.policy().of("x").mode is TrustMode.OFF
    file.unlink()
    with pytest.raises(InvalidField):
        held.policy()
    file.write_text(text)
    assert held.policy() == good, "a failed look is not kept"


@pytest.mark.parametrize("wrong", ["missing", "broken"])
@pytest.mark.parametrize("then", ["fifo", "directory"])
def test_what_refuses_refuses_on_until_a_good_regular_file_is_there(
    tmp_path: Path, wrong: str, then: str
) -> None:
    file = tmp_path / "trust.json"
    text = json.dumps(trust_document())
    file.write_text(text)
    held = TrustFile(file)
    good = held.policy()
    if wrong == "broken":
        file.write_text("{")
    else:
        file.unlink()
    with pytest.raises(InvalidField) as first:
        held.policy()
    file.unlink(missing_ok=True)
    if then == "fifo":
        os.mkfifo(file)
    else:
        file.mkdir()
    for _ in range(2):
        with pytest.raises(InvalidField, match="no regular file") as caught:
            held.policy()
        assert str(first.value) in caught.value.remedy, "why it began is still said"
    if then == "fifo":
        file.unlink()
    else:
        file.rmdir()
    file.write_text(text)
    assert held.policy() == good
    file.unlink()
    os.mkfifo(file)
    assert held.policy() == good, "without a refusal before it, the policy read last is in force"


def test_keys_are_kept_apart_and_never_overwritten(tmp_path: Path) -> None:
    made = SigningKey.new(tmp_path / "k.pem")
    assert (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    assert SigningKey.read(tmp_path / "k.pem").key_id == made.key_id == key_id(made.public_key)
    with pytest.raises(Conflict):
        SigningKey.new(tmp_path / "k.pem")
    with pytest.raises(InvalidField):
        SigningKey.new(tmp_path / "no" / "k.pem")
    assert payload_of(DIGEST) != payload_of(OTHER)


def test_what_is_wrong_with_a_trust_file_names_its_path(tmp_path: Path) -> None:
    """Several files may be meant: registry and agents have each their own."""
    file = tmp_path / "trust.json"
    for spoil in (
        "{",
        '{"schema": "other"}',
        json.dumps(trust_document(default={"mode": "maybe"})),
    ):
        file.write_text(spoil)
        with pytest.raises(InvalidField) as caught:
            TrustFile(file)
        assert str(file) in str(caught.value) and str(file) in caught.value.remedy


def test_a_public_key_does_not_sign_and_the_private_one_is_named(tmp_path: Path) -> None:
    private = tmp_path / "release.pem"
    SigningKey.new(private)
    public = tmp_path / "release.pem.pub"
    with pytest.raises(InvalidField, match="public half") as caught:
        SigningKey.read(public)
    assert caught.value.remedy.endswith(f"here {private}")
    private.rename(tmp_path / "elsewhere.pem")
    with pytest.raises(InvalidField, match=r"sign with the private key$"):
        SigningKey.read(public)
