"""Who may say that a manifest is good, and whether anybody did. Pure.

Owns the envelope of a signature (DSSE over the manifest's digest), the trust policy of models, and
the verdict `trusted`. Whoever calls it hands in the check of one Ed25519 signature (`kit.signing`),
so that registry and agent judge alike. Called by the registry on Resolve, and by the agent before
it loads.

What is signed is the manifest's digest, once, never the bytes: the manifest holds their digests.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from readyplane.core.canonical import canonical, check_digest, parse
from readyplane.core.errors import InvalidField

SCHEMA = "readyplane/trust/1"
PAYLOAD_TYPE = "application/vnd.readyplane.manifest.v1+json"
ENVELOPE_BYTES_MAX = 8192
SIGNATURES_MAX = 32
KEYS_MAX = 256
MODELS_MAX = 10_000
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

Verify = Callable[[bytes, bytes, bytes], bool]
"""(public key of 32 bytes, signature of 64 bytes, message) -> whether it is that key's."""


class TrustMode(StrEnum):
    """What a missing or bad signature means: nothing, a warning, or a refusal."""

    OFF = "off"
    WARN = "warn"
    REQUIRE = "require"


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature of a manifest as it is stored.

    Attributes:
        key_id: `ed25519:` and the sha256 of the public key; the id cannot be claimed by another.
        public_key: 32 bytes.
        envelope: the DSSE envelope as JSON text.
        created_s: when the registry stored it (its wall clock, s); nothing is judged by it.
    """

    key_id: str
    public_key: bytes
    envelope: str
    created_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ManifestEvent:
    """What happened to a manifest: `origin`, `retired` or `restored`, with its details."""

    event: str
    detail: Mapping[str, str]
    created_s: float


@dataclass(frozen=True, slots=True)
class Trail:
    """What was said of a manifest since it was published; events oldest first."""

    signatures: tuple[Signature, ...] = ()
    events: tuple[ManifestEvent, ...] = ()

    @property
    def retired(self) -> bool:
        """Hidden: nobody resolves to it, and its bytes may be gone."""
        states = [e.event for e in self.events if e.event in {"retired", "restored"}]
        return states[-1:] == ["retired"]

    @property
    def origin(self) -> Mapping[str, str]:
        """Where its bytes came from when it was last published; empty when nobody said."""
        told = [e.detail for e in self.events if e.event == "origin"]
        return told[-1] if told else {}


@dataclass(frozen=True, slots=True)
class TrustKey:
    """A public key that is believed, for a while.

    Attributes:
        name: in the policy file; models name their keys by it.
        not_before_s, retired_s: wall clock (s) of whoever judges; None: always, for ever. From
            `retired_s` on nothing that the key signed counts, whenever it was signed.
    """

    name: str
    public_key: bytes
    not_before_s: float | None = None
    retired_s: float | None = None

    @property
    def key_id(self) -> str:
        """See `Signature.key_id`."""
        return key_id(self.public_key)


@dataclass(frozen=True, slots=True)
class ModelTrust:
    """What one model asks for: any `threshold` of these keys (empty: of all keys)."""

    mode: TrustMode
    keys: tuple[str, ...] = ()
    threshold: int = 1


@dataclass(frozen=True, slots=True)
class TrustPolicy:
    """What may be loaded: keys by name, and what each model asks for; `default` for all others."""

    keys: Mapping[str, TrustKey] = field(default_factory=dict)
    models: Mapping[str, ModelTrust] = field(default_factory=dict)
    default: ModelTrust = field(default_factory=lambda: ModelTrust(TrustMode.OFF))

    def of(self, model: str) -> ModelTrust:
        """What a model asks for."""
        return self.models.get(model, self.default)


@dataclass(frozen=True, slots=True)
class TrustVerdict:
    """Whether a manifest may be loaded, and why.

    Attributes:
        allowed: False only under `require`.
        verified: the signatures that were asked for are there.
        reason: one sentence; names the keys expected when one is missing.
        keys: names of the keys whose signature counted.
    """

    allowed: bool
    verified: bool
    mode: TrustMode
    reason: str
    keys: tuple[str, ...] = ()


def key_id(public_key: bytes) -> str:
    """`ed25519:<64 hex>`: the sha256 of the public key's 32 bytes."""
    return "ed25519:" + hashlib.sha256(public_key).hexdigest()


def payload_of(digest: str) -> bytes:
    """The payload that a signature of a manifest carries."""
    return canonical({"manifest": check_digest(digest)})


def signed_message(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """DSSE's pre-authentication encoding: what the key really signs."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def envelope_of(digest: str, public_key: bytes, signature: bytes) -> str:
    """The DSSE envelope of one signature, as canonical JSON."""
    document = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload_of(digest)).decode(),
        "signatures": [
            {"keyid": key_id(public_key), "sig": base64.b64encode(signature).decode()},
        ],
    }
    return canonical(document).decode()


def read_envelope(envelope: str | bytes) -> tuple[str, str, bytes]:
    """(digest, key id, signature of 64 bytes) of an envelope; nothing is verified yet.

    Raises:
        InvalidField: not such an envelope; the field is named.
    """
    if len(envelope) > ENVELOPE_BYTES_MAX:
        remedy = f"stay below {ENVELOPE_BYTES_MAX} bytes"
        raise InvalidField("envelope", f"{len(envelope)} bytes", remedy)
    document = _object(parse(envelope, where="envelope"), "envelope")
    if document.get("payloadType") != PAYLOAD_TYPE:
        remedy = f"write {PAYLOAD_TYPE}"
        raise InvalidField("envelope.payloadType", document.get("payloadType"), remedy)
    payload = _object(parse(_bytes(document.get("payload"), "envelope.payload")), "payload")
    digest = payload.get("manifest")
    if set(payload) != {"manifest"} or not isinstance(digest, str):
        raise InvalidField("envelope.payload", payload, "sign exactly the manifest's digest")
    signatures = document.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise InvalidField("envelope.signatures", signatures, "give one signature an envelope")
    signed = _object(signatures[0], "envelope.signatures[0]")
    name = signed.get("keyid")
    if not isinstance(name, str) or not name:
        raise InvalidField("envelope.signatures[0].keyid", name, "name the key")
    raw = _bytes(signed.get("sig"), "envelope.signatures[0].sig")
    if len(raw) != SIGNATURE_BYTES:
        remedy = f"give {SIGNATURE_BYTES} bytes of Ed25519"
        raise InvalidField("envelope.signatures[0].sig", f"{len(raw)} bytes", remedy)
    return check_digest(digest, where="envelope.payload.manifest"), name, raw


def check_signature(digest: str, public_key: bytes, envelope: str, verify: Verify) -> Signature:
    """The signature as it may be stored: it is the key's, over this digest.

    Raises:
        InvalidField: another digest, key or signature; nothing that does not verify is stored.
    """
    if len(public_key) != PUBLIC_KEY_BYTES:
        remedy = f"give the {PUBLIC_KEY_BYTES} bytes of an Ed25519 public key"
        raise InvalidField("public_key", f"{len(public_key)} bytes", remedy)
    signed, name, raw = read_envelope(envelope)
    if signed != digest:
        raise InvalidField("envelope.payload.manifest", signed, f"sign {digest}")
    if name != key_id(public_key):
        raise InvalidField("envelope.signatures[0].keyid", name, f"write {key_id(public_key)}")
    if not verify(public_key, raw, signed_message(payload_of(digest))):
        remedy = f"sign again with the private key of {name}"
        raise InvalidField("envelope.signatures[0].sig", envelope[-40:], remedy)
    return Signature(name, public_key, envelope)


def trusted(
    digest: str,
    signatures: Sequence[Signature],
    policy: TrustPolicy,
    *,
    model: str,
    now_s: float,
    verify: Verify,
) -> TrustVerdict:
    """Whether this manifest of this model may be loaded now.

    The public keys are those of the policy; what a signature says of its own key is no proof.

    Args:
        now_s: wall clock of whoever judges, seconds since the epoch.
    """
    wanted = policy.of(model)
    if wanted.mode is TrustMode.OFF:
        return TrustVerdict(True, False, wanted.mode, f"{model}: no signature is asked for")
    names = wanted.keys or tuple(sorted(policy.keys))
    held = {signature.key_id: signature for signature in signatures}
    good: list[str] = []
    missing: list[str] = []
    for name in names:
        key = policy.keys[name]
        fault = _fault(digest, key, held.get(key.key_id), now_s, verify)
        if fault:
            missing.append(f"{name} ({key.key_id}): {fault}")
        else:
            good.append(name)
    if len(good) >= wanted.threshold:
        reason = f"{model}: signed by {', '.join(good)}"
        return TrustVerdict(True, True, wanted.mode, reason, tuple(good))
    others = sorted(set(held) - {policy.keys[name].key_id for name in names})
    reason = (
        f"{model}: {digest} needs {wanted.threshold} signature(s), has {len(good)}; expected "
        + ("; ".join(missing) or "a key, and the policy has none")
        + (f"; signed by {', '.join(others[:3])}, which it does not trust" if others else "")
    )
    return TrustVerdict(wanted.mode is not TrustMode.REQUIRE, False, wanted.mode, reason)


def _fault(
    digest: str, key: TrustKey, signature: Signature | None, now_s: float, verify: Verify
) -> str:
    """Why a key's signature does not count; empty when it does."""
    if key.retired_s is not None and now_s >= key.retired_s:
        return "the key is retired"
    if key.not_before_s is not None and now_s < key.not_before_s:
        return "the key is not in force yet"
    if signature is None:
        return "no signature"
    try:
        signed, _name, raw = read_envelope(signature.envelope)
    except InvalidField as error:
        return f"no readable signature ({error.field})"
    if signed != digest:
        return f"its signature is of {signed}"
    if not verify(key.public_key, raw, signed_message(payload_of(digest))):
        return "its signature does not verify"
    return ""


def read_policy(document: object, *, parse_time: Callable[[str], float]) -> TrustPolicy:
    """A trust policy from its document.

    Args:
        parse_time: RFC 3339 text to seconds since the epoch; raises ValueError.

    Raises:
        InvalidField: names the field, the value and what to write.
    """
    doc = _object(document, "trust")
    _known(doc, ("schema", "keys", "models", "default"), "trust")
    if doc.get("schema") != SCHEMA:
        raise InvalidField("trust.schema", doc.get("schema"), f"write {SCHEMA}")
    given = _object(doc.get("keys", {}), "trust.keys")
    if len(given) > KEYS_MAX:
        raise InvalidField("trust.keys", len(given), f"list {KEYS_MAX} at most")
    keys = {name: _read_key(name, item, parse_time) for name, item in given.items()}
    seen: dict[str, str] = {}
    for name, key in keys.items():
        if seen.setdefault(key.key_id, name) != name:
            raise InvalidField(f"trust.keys.{name}", key.key_id, "list each key once")
    models = _object(doc.get("models", {}), "trust.models")
    if len(models) > MODELS_MAX:
        raise InvalidField("trust.models", len(models), f"list {MODELS_MAX} at most")
    return TrustPolicy(
        keys=keys,
        models={
            name: _read_model(item, f"trust.models.{name}", keys) for name, item in models.items()
        },
        default=_read_model(doc.get("default", {"mode": "off"}), "trust.default", keys),
    )


def _read_key(name: str, item: object, parse_time: Callable[[str], float]) -> TrustKey:
    where = f"trust.keys.{name}"
    doc = _object(item, where)
    _known(doc, ("public_key", "not_before", "retired"), where)
    raw = _bytes(doc.get("public_key"), f"{where}.public_key")
    if len(raw) != PUBLIC_KEY_BYTES:
        remedy = f"give base64 of the {PUBLIC_KEY_BYTES} bytes of an Ed25519 public key"
        raise InvalidField(f"{where}.public_key", f"{len(raw)} bytes", remedy)
    begins = _time(doc.get("not_before"), f"{where}.not_before", parse_time)
    retired = _time(doc.get("retired"), f"{where}.retired", parse_time)
    if begins is not None and retired is not None and retired < begins:
        remedy = f"give a time from not_before ({doc['not_before']}) on: the key is never in force"
        raise InvalidField(f"{where}.retired", doc["retired"], remedy)
    return TrustKey(name, raw, begins, retired)


def _time(value: object, where: str, parse_time: Callable[[str], float]) -> float | None:
    if value is None:
        return None
    try:
        if isinstance(value, str):
            return parse_time(value)
    except ValueError:
        pass
    raise InvalidField(where, value, "write a time with its zone, as 2026-12-01T00:00:00Z")


def _read_model(item: object, where: str, keys: Mapping[str, TrustKey]) -> ModelTrust:
    doc = _object(item, where)
    _known(doc, ("mode", "keys", "threshold"), where)
    try:
        mode = TrustMode(str(doc.get("mode")))
    except ValueError:
        remedy = "write one of " + ", ".join(TrustMode)
        raise InvalidField(f"{where}.mode", doc.get("mode"), remedy) from None
    names = doc.get("keys", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InvalidField(f"{where}.keys", names, "list names of trust.keys")
    for name in names:
        if name not in keys:
            raise InvalidField(f"{where}.keys", name, "name a key of trust.keys")
    if len(set(names)) != len(names):
        raise InvalidField(f"{where}.keys", names, "list each name once")
    threshold = doc.get("threshold", 1)
    most = len(names) or len(keys)
    if mode is not TrustMode.OFF and not most:
        raise InvalidField(f"{where}.keys", names, "list a key in trust.keys, or write mode off")
    if (
        isinstance(threshold, bool)
        or not isinstance(threshold, int)
        or (not 1 <= threshold <= max(1, most))
    ):
        raise InvalidField(f"{where}.threshold", threshold, f"use 1 to {max(1, most)}")
    return ModelTrust(mode, tuple(names), threshold)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidField(where, value, "use an object")
    return dict(value)


def _bytes(value: object, where: str) -> bytes:
    try:
        if isinstance(value, str):
            return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise InvalidField(where, value, "write base64")


def _known(doc: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    for name in sorted(set(doc) - set(names), key=str):
        raise InvalidField(f"{where}.{name}", doc[name], "remove the unknown field")
