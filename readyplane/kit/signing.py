"""Ed25519 keys on disk and the check of one signature: the effects beside `core.trust`.

Owns how a private key is made, kept (PEM, readable by its owner alone) and used, and how a trust
policy is read from a file and read again when it changes. Handed to the command line, which signs,
and to registry and agent, which check.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from readyplane.core.canonical import parse
from readyplane.core.errors import Conflict, InvalidField
from readyplane.core.trust import (
    TrustPolicy,
    envelope_of,
    key_id,
    payload_of,
    read_policy,
    signed_message,
)

KEY_FILE_BYTES_MAX = 16 * 1024
POLICY_FILE_BYTES_MAX = 4 * 1024 * 1024


def verify_ed25519(public_key: bytes, signature: bytes, message: bytes) -> bool:
    """Whether the signature over the message is the key's."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


class SigningKey:
    """A private key in memory; see `new` and `read`."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_key: bytes = private.public_key().public_bytes_raw()
        self.key_id = key_id(self.public_key)

    @classmethod
    def new(cls, path: Path) -> SigningKey:
        """Make a key and keep it at `path` (mode 0600), its public half at `path.pub`.

        Raises:
            Conflict: a file is there already; keys are never overwritten.
            InvalidField: the folder cannot be written.
        """
        made = cls(Ed25519PrivateKey.generate())
        private = made._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        public = made._private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        _write_new(path, private, 0o600)
        _write_new(path.with_name(path.name + ".pub"), public, 0o644)
        return made

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """A key that `new` or any other maker of PKCS#8 PEM has written.

        Raises:
            InvalidField: no such file, others may read it, or it is no unencrypted Ed25519 key.
        """
        remedy = "give the PEM file of an Ed25519 private key (`readyplane artifact key new FILE`)"
        try:
            if path.stat().st_mode & 0o077:
                raise InvalidField("sign_key", str(path), f"run chmod 600 {path}: others read it")
            data = path.read_bytes()[:KEY_FILE_BYTES_MAX]
            found = serialization.load_pem_private_key(data, password=None)
        except (OSError, ValueError, TypeError) as error:
            raise InvalidField("sign_key", str(path), f"{remedy}; {error}") from error
        if not isinstance(found, Ed25519PrivateKey):
            raise InvalidField("sign_key", str(path), remedy)
        return cls(found)

    def envelope(self, digest: str) -> str:
        """A signature of a manifest's digest, as DSSE envelope."""
        signature = self._private.sign(signed_message(payload_of(digest)))
        return envelope_of(digest, self.public_key, signature)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise Conflict(
            f"key file {path}", "no such file", "one is there", "give another name"
        ) from error
    except OSError as error:
        raise InvalidField("FILE", str(path), f"it can't be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(descriptor)


def seconds_of_rfc3339(text: str) -> float:
    """`2026-12-01T00:00:00Z` as seconds since the epoch. Raises ValueError, also without a zone."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(text)
    return found.astimezone(UTC).timestamp()


class TrustFile:
    """A trust policy in a file, read again when the file is another one.

    Args:
        path: None: nobody asks for signatures.

    Raises:
        InvalidField: the file cannot be read or is wrong; once read, a file that became wrong
            raises as well: the policy before it is not used any more, since a key may have been
            retired by the change.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._policy = TrustPolicy()
        self.policy()

    def policy(self) -> TrustPolicy:
        """The policy as the file says now."""
        if self._path is None:
            return self._policy
        try:
            facts = self._path.stat()
            seen = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if seen == self._seen:
                return self._policy
            if facts.st_size > POLICY_FILE_BYTES_MAX:
                remedy = f"stay below {POLICY_FILE_BYTES_MAX} bytes"
                raise InvalidField("trust_file", str(self._path), remedy)
            data = self._path.read_bytes()
        except OSError as error:
            raise InvalidField(
                "trust_file", str(self._path), f"give a file that can be read ({error.strerror})"
            ) from error
        document = parse(data, where="trust")
        self._policy = read_policy(document, parse_time=seconds_of_rfc3339)
        self._seen = seen
        return self._policy
