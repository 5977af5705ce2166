"""DAX devices: memory that a device brings, CXL's for one, which several processes and hosts can map.

Source: the kernel's documentation of device-dax: only shared mappings, base and length multiples of the device's
alignment, no read or write.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys")

_LOCK = struct.Struct("hhqqi")  # C's struct flock: type, whence, start, length, process


class DaxDevice(NamedTuple):
    """What the kernel says of a DAX device."""

    path: Path
    nbytes: int
    alignment: int


def dax_device(path: Path, sysfs: Path = SYSFS) -> DaxDevice | None:
    """Return the DAX device of that path, None where the kernel knows none."""
    facts = sysfs / "bus" / "dax" / "devices" / path.name
    try:
        return DaxDevice(path, int((facts / "size").read_text()), int((facts / "align").read_text()))
    except (OSError, ValueError):
        return None


def dax_devices(sysfs: Path = SYSFS) -> list[DaxDevice]:
    """Return all of this machine, by name."""
    folder = sysfs / "bus" / "dax" / "devices"
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [device for name in names if (device := dax_device(Path("/dev") / name, sysfs)) is not None]


def claim(device: DaxDevice, nbytes: int) -> tuple[int, int] | None:
    """Lock a stretch of a device on which no other region of this host lies.

    The kernel keeps the locks of all processes, and drops those of one that ends.

    Returns:
        (where it begins, the handle that holds the lock until it is closed); None where there is no room.

    Raises:
        OSError: the device cannot be opened.
    """
    handle = os.open(device.path, os.O_RDWR)
    start = 0
    while start + nbytes <= device.nbytes:
        lock = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, nbytes, 0)
        try:
            fcntl.fcntl(handle, fcntl.F_OFD_SETLK, lock)
            return start, handle
        except BlockingIOError:
            _, _, other, length, _ = _LOCK.unpack(fcntl.fcntl(handle, fcntl.F_OFD_GETLK, lock))
            start = other + length
    os.close(handle)
    return None
