"""The one error tree. Every error names what is wrong and what to do about it.

Owns the reasons that users, clients and logs see; `readyplane.wire` maps each class to a gRPC
status and an HTTP status, so that both speak alike. No status codes live here.
"""

from __future__ import annotations

from collections.abc import Sequence


class ReadyplaneError(Exception):
    """Root of the tree. `reason` is the class name and is stable across the wire."""

    retry_after_s: float | None = None

    @property
    def reason(self) -> str:
        """Stable machine-readable reason."""
        return type(self).__name__

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the way to another process: `__init__` takes other arguments than `args`."""
        return _again, (type(self), self.args, dict(self.__dict__))


def _again(
    kind: type[ReadyplaneError], args: tuple[object, ...], fields: dict[str, object]
) -> ReadyplaneError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class InvalidField(ReadyplaneError):
    """A field of a request, manifest, policy or setting is wrong.

    Args:
        field: dotted path of the field, for example `policy.prefill.min`.
        value: the offending value as given (shortened in the message).
        remedy: what to write instead.
        message: overrides the generated sentence.
    """

    def __init__(self, field: str, value: object, remedy: str, message: str | None = None) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        shown = repr(value)
        shown = shown if len(shown) <= 120 else shown[:117] + "..."
        super().__init__(message or f"{field}: {shown} is not valid; {remedy}")


class PromptTooLong(InvalidField):
    """The prompt (plus the asked output) exceeds what the model allows."""


class UnknownField(InvalidField):
    """A field that does not exist was given (a typo is never ignored)."""


class NotFound(ReadyplaneError):
    """A named thing does not exist."""

    def __init__(self, what: str, name: object, remedy: str = "check the name") -> None:
        self.what, self.name, self.remedy = what, name, remedy
        super().__init__(f"{what} {name!r} is not known; {remedy}")


class Conflict(ReadyplaneError):
    """Somebody else changed it first, or the same name is bound to other content."""

    def __init__(self, what: str, expected: object, found: object, remedy: str) -> None:
        self.what, self.expected, self.found, self.remedy = what, expected, found, remedy
        super().__init__(f"{what}: expected {expected!r}, found {found!r}; {remedy}")


class StaleEpoch(Conflict):
    """A proposal or renewal carries an epoch that has been fenced off."""


class LostLease(ReadyplaneError):
    """The lease expired or belongs to another incarnation; register again."""

    def __init__(self, worker_id: str, incarnation: str, why: str) -> None:
        self.worker_id, self.incarnation, self.why = worker_id, incarnation, why
        super().__init__(
            f"lease of worker {worker_id} (incarnation {incarnation}) is lost: {why}; register again"
        )


class Refused(ReadyplaneError):
    """A verdict went against the caller; every reason is listed."""

    def __init__(self, what: str, reasons: Sequence[str], remedy: str = "") -> None:
        self.what, self.reasons, self.remedy = what, tuple(reasons), remedy
        tail = f"; {remedy}" if remedy else ""
        super().__init__(f"{what} refused: {'; '.join(self.reasons)}{tail}")


class IdentityMismatch(Refused):
    """Content is not what its identity says, or two identities do not fit; fields are named."""


class BytesMissing(Refused):
    """The bytes of an artifact are not stored, or not any more; uploading them again helps."""


class NoPair(ReadyplaneError):
    """No pair of prefill and decode worker can take the request now.

    Args:
        why: what is missing (no ready prefill worker, no compatible pair, ...).
        retry_after_s: when asking again makes sense.
    """

    def __init__(self, why: str, retry_after_s: float) -> None:
        self.why, self.retry_after_s = why, retry_after_s
        super().__init__(f"no pair: {why}; retry after {retry_after_s:.1f} s")


class NoCompatiblePair(NoPair):
    """Workers exist, but no prefill worker fits any decode worker; differing fields are named."""


class Overloaded(NoPair):
    """The request was shed because it could not be served within its bound."""


class Unavailable(ReadyplaneError):
    """A dependency (store, service, engine) cannot be reached or is not ready."""

    def __init__(self, what: str, remedy: str, retry_after_s: float = 1.0) -> None:
        self.what, self.remedy, self.retry_after_s = what, remedy, retry_after_s
        super().__init__(f"{what}; {remedy}")


class Unsupported(ReadyplaneError):
    """The request asks for something that is deliberately not offered."""

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        super().__init__(f"{what} is not supported; {remedy}")


class Unauthenticated(ReadyplaneError):
    """A call that changes something came without a valid token."""

    def __init__(self, remedy: str = "send the token as `authorization: Bearer TOKEN`") -> None:
        self.remedy = remedy
        super().__init__(f"not authenticated; {remedy}")
