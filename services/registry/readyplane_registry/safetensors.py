"""The header of a safetensors file, as `readyplane.core.safetensors` reads it.

Owns nothing: the agent reads headers by the same rules.
"""

from readyplane.core.safetensors import (
    HEADER_BYTES_MAX,
    PREFIX_BYTES,
    header_bytes,
    tensors_of,
)

__all__ = ["HEADER_BYTES_MAX", "PREFIX_BYTES", "header_bytes", "tensors_of"]
