"""Proto <-> core values and error <-> status, each pair side by side.

For a value X of `readyplane.core` or `readyplane.ports` there are `x_to_proto` and `x_from_proto`.
Services translate with these only; nothing here decides anything.
"""

from readyplane.wire.errors import (
    error_from_document,
    error_from_rpc,
    error_to_document,
    error_to_status,
    grpc_code,
    http_status,
)

__all__ = [
    "error_from_document",
    "error_from_rpc",
    "error_to_document",
    "error_to_status",
    "grpc_code",
    "http_status",
]
