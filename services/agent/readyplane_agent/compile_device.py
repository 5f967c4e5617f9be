"""`python -m readyplane_agent.compile_device`: which CUDA devices this process would see, as JSON.

Owns the questions to the driver's library. A process of its own, because a driver that hangs is
killed with it, and because a process that has asked once can no longer be forked safely. Prints
`{"devices": [{"name", "capability", "sm_count", "total_bytes"}, …]}`, or `{"problem": …}`; an empty
list says that there is no driver or no device. Handed to `compile_inspect`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

LIBRARY = "libcuda.so.1"
NO_DEVICE = 100
SM_COUNT, MAJOR, MINOR = 16, 75, 76
DEVICES_MAX = 64


def devices(library: Any) -> dict[str, Any]:
    """What the driver says of every visible device."""

    def ask(function: str, *arguments: Any) -> int:
        return int(getattr(library, function)(*arguments))

    code = ask("cuInit", 0)
    if code == NO_DEVICE:
        return {"devices": []}
    if code:
        return {"problem": f"cuInit answered {code}"}
    count = ctypes.c_int()
    if ask("cuDeviceGetCount", ctypes.byref(count)):
        return {"problem": "cuDeviceGetCount failed"}
    found = []
    for ordinal in range(min(count.value, DEVICES_MAX)):
        device, total = ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(256)
        numbers = {what: ctypes.c_int() for what in (SM_COUNT, MAJOR, MINOR)}
        codes = [
            ask("cuDeviceGet", ctypes.byref(device), ordinal),
            ask("cuDeviceGetName", name, len(name), device),
            ask("cuDeviceTotalMem_v2", ctypes.byref(total), device),
            *(
                ask("cuDeviceGetAttribute", ctypes.byref(number), what, device)
                for what, number in numbers.items()
            ),
        ]
        if any(codes):
            return {"problem": f"device {ordinal} answered {codes}"}
        found.append(
            {
                "name": name.value.decode("utf-8", "replace"),
                "capability": f"sm{numbers[MAJOR].value}{numbers[MINOR].value}",
                "sm_count": numbers[SM_COUNT].value,
                "total_bytes": total.value,
            }
        )
    return {"devices": found}


def main() -> None:
    """Print what is found."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError:
        found: dict[str, Any] = {"devices": []}
    else:
        found = devices(library)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
