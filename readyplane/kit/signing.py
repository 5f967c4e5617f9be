"""Ed25519 keys on disk and the check of one signature: the effects beside `core.trust`.

Owns how a private key is made, kept (PEM, readable by its owner alone) and used, and how a trust
policy is read from a file and read again when it changes. Handed to the command line, which signs,
and to registry and agent, which check.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from dataclasses import dataclass
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
LOOK_S_MAX = 0.25
FIRST_LOOK_S_MAX = 10.0

log = logging.getLogger(__name__)


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
            if path.stat().st_mode & 0o077 and not _is_public(path):
                raise InvalidField("sign_key", str(path), f"run chmod 600 {path}: others read it")
            data = path.read_bytes()[:KEY_FILE_BYTES_MAX]
            found = serialization.load_pem_private_key(data, password=None)
        except (OSError, ValueError, TypeError) as error:
            if _is_public(path):
                half = path.with_suffix("") if path.suffix == ".pub" else None
                beside = f", here {half}" if half is not None and half.is_file() else ""
                told = f"this is the public half, for others: sign with the private key{beside}"
                raise InvalidField("sign_key", str(path), told) from error
            raise InvalidField("sign_key", str(path), f"{remedy}; {error}") from error
        if not isinstance(found, Ed25519PrivateKey):
            raise InvalidField("sign_key", str(path), remedy)
        return cls(found)

    def envelope(self, digest: str) -> str:
        """A signature of a manifest's digest, as DSSE envelope."""
        signature = self._private.sign(signed_message(payload_of(digest)))
        return envelope_of(digest, self.public_key, signature)


def _is_public(path: Path) -> bool:
    """Whether a file holds a public key in PEM."""
    try:
        with path.open("rb") as file:
            return b"-----BEGIN PUBLIC KEY-----" in file.read(KEY_FILE_BYTES_MAX)
    except OSError:
        return False


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

    The file is looked at in a thread that is waited for `LOOK_S_MAX` at most, so that a mount that
    hangs does not hold up the event loop of who asks. As long as a look hangs, or what stands at
    the path is no regular file (a FIFO), the policy read last stays in force, and that is logged;
    after a refusal it does not: what was refused stays so until a good regular file is read.

    Args:
        path: None: nobody asks for signatures.

    Raises:
        InvalidField: the file cannot be read or is wrong; once read, a file that became wrong or
            was taken away raises as well: the policy before it is not used any more, since a key
            may have been retired by the change.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._policy = TrustPolicy()
        self._look: _Look | None = None
        self._doubt = ""
        self._refused = ""
        if path is None:
            return
        found = _Look(path, None).within(FIRST_LOOK_S_MAX)
        if isinstance(found, str):
            raise InvalidField(
                "trust_file", str(path), f"give a regular file that can be read: {found}"
            )
        self._take(found)

    def policy(self) -> TrustPolicy:
        """The policy as the file says now, or as it said last where nobody can tell (see above)."""
        if self._path is None:
            return self._policy
        look, wait_s = self._look, 0.0
        if look is None:
            look, wait_s = _Look(self._path, self._seen), LOOK_S_MAX
        self._look = look  # one at a time: a mount that hangs takes one thread, not one a request
        try:
            found = look.within(wait_s)
            if not isinstance(found, str):
                self._tell("")
                self._take(found)
        except Exception as error:
            self._refused = str(error)
            raise
        finally:
            if look.done:
                self._look = None
        if not isinstance(found, str):
            self._refused = ""
        elif self._refused:
            told = f"put a regular file with a trust policy there: {found}; before: {self._refused}"
            raise InvalidField("trust_file", str(self._path), told)
        else:
            self._tell(found)
        return self._policy

    def _take(self, found: _Content | None) -> None:
        if found is None:
            return
        try:
            document = parse(found.data, where="trust")
            self._policy = read_policy(document, parse_time=seconds_of_rfc3339)
        except InvalidField as error:
            where = f"in the trust file {self._path}: {error.remedy}"
            raise InvalidField(error.field, error.value, where) from error
        self._seen = found.seen

    def _tell(self, doubt: str) -> None:
        """Once for each new doubt, and once when it is over."""
        if doubt != self._doubt:
            if doubt:
                log.error(
                    "trust file: the policy read last stays in force",
                    extra={"trust_file": str(self._path), "why": doubt},
                )
            else:
                log.warning("trust file: read again", extra={"trust_file": str(self._path)})
        self._doubt = doubt


@dataclass(frozen=True, slots=True)
class _Content:
    seen: tuple[int, int, int]
    data: bytes


class _Look:
    """One look at the file, in a thread of its own: it dies with the process when it hangs."""

    def __init__(self, path: Path, seen: tuple[int, int, int] | None) -> None:
        self._path, self._seen = path, seen
        self._found: _Content | Exception | str | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="trust-file", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether it has come to an end."""
        return self._ended.is_set()

    def within(self, seconds: float) -> _Content | str | None:
        """The new content, None where it is the one that was seen, or in words why nobody knows.

        Raises:
            InvalidField: it cannot be read, or is too long.
        """
        if not self._ended.wait(seconds):
            return "it does not answer; look after the mount that it lies on"
        if isinstance(self._found, Exception):
            raise self._found
        return self._found

    def _run(self) -> None:
        try:
            self._found = self._read()
        except OSError as error:
            self._found = InvalidField(
                "trust_file", str(self._path), f"give a file that can be read ({error.strerror})"
            )
        except Exception as error:  # noqa: BLE001 - raised again where it is waited for
            self._found = error
        finally:
            self._ended.set()

    def _read(self) -> _Content | str | None:
        # Without O_NONBLOCK the opening of a FIFO waits for somebody who writes to it.
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):  # a directory, too: `fdopen` takes none
            os.close(descriptor)
            return f"it is no regular file ({stat.filemode(facts.st_mode)})"
        with os.fdopen(descriptor, "rb") as file:
            seen = (facts.st_mtime_ns, facts.st_size, facts.st_ino)
            if seen == self._seen:
                return None
            data = file.read(POLICY_FILE_BYTES_MAX + 1)
        if len(data) > POLICY_FILE_BYTES_MAX:
            remedy = f"stay below {POLICY_FILE_BYTES_MAX} bytes"
            raise InvalidField("trust_file", str(self._path), remedy)
        return _Content(seen, data)
