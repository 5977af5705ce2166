"""A region of memory that several ranks map: a file on /dev/shm, a plain file, or a DAX device.

Source: the kernel's documentation of device-dax: only shared mappings, base and length multiples of the device's
alignment, no read or write.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import uuid
from pathlib import Path

import torch

from collectives.options import OptionError

# Files without a name that this process made, and the handles that keep them until every rank has mapped them.
_nameless: dict[Path, int] = {}


class Region:
    """Mapped memory, released when the last tensor made of it is gone.

    Attributes:
        path: the file or device behind it.
        memory: uint8 [nbytes], shared with every process that maps the same path.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        """Map an existing file or device.

        Raises:
            OSError: it cannot be opened or mapped.
        """
        self.path = path
        handle = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(handle)
            self._is_device = stat.S_ISCHR(status.st_mode)
            if not self._is_device and status.st_size < nbytes:
                raise OSError(errno.EINVAL, "it is another file of that name")
            mapping = mmap.mmap(handle, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(handle)
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)

    def remove_name(self) -> None:
        """Delete the file, not the memory; for who made it, once every rank has mapped it. A device stays."""
        if not self._is_device:
            _remove(self.path)


def reserve(path: Path, nbytes: int, sysfs: Path = Path("/sys")) -> tuple[Path, int]:
    """Make room for a region.

    Args:
        path: a folder, in which a file is made, where possible one without a name, so that nothing is left behind
            however the ranks end; the name of a new file; or a DAX device.
        nbytes: room needed.
        sysfs: where the kernel describes devices.

    Returns:
        The file or device to map, and the length to map it with.

    Raises:
        OptionError: there is not enough room, or the path cannot be used.
    """
    if path.is_char_device():
        return path, _device_length(path, nbytes, sysfs)
    try:
        file = _make(path)
    except OSError as error:
        raise OptionError(f"pool: path={path} is not possible: {error.strerror}; give a folder or a new file") from None
    try:
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, nbytes)  # a full tmpfs would otherwise kill who touches it
    except OSError as error:
        _remove(file)
        raise OptionError(
            f"pool: {path} has no room for {nbytes} bytes ({error.strerror}); choose a smaller slot_bytes or "
            "another path"
        ) from None
    return file, nbytes


def _make(path: Path) -> Path:
    """Make an empty file, and return where all ranks of this machine find it."""
    if path.is_dir() and sys.platform == "linux":
        with contextlib.suppress(OSError):  # some file systems know no files without a name
            handle = os.open(path, os.O_RDWR | os.O_TMPFILE, 0o600)
            file = Path(f"/proc/{os.getpid()}/fd/{handle}")
            _nameless[file] = handle
            return file
    file = path / f"gradwire-pool-{uuid.uuid4().hex}" if path.is_dir() else path
    os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    return file


def _remove(file: Path) -> None:
    if file in _nameless:
        os.close(_nameless.pop(file))
    else:
        file.unlink(missing_ok=True)


def rounded_up(nbytes: int, alignment: int) -> int:
    """The next multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def _device_length(path: Path, nbytes: int, sysfs: Path) -> int:
    facts = sysfs / "bus" / "dax" / "devices" / path.name
    try:
        size, alignment = (int((facts / name).read_text()) for name in ("size", "align"))
    except (OSError, ValueError):
        raise OptionError(f"pool: path={path} is a device, but no DAX device that the kernel describes") from None
    length = rounded_up(nbytes, alignment)
    if length > size:
        raise OptionError(
            f"pool: {path} holds {size} bytes and {length} are needed; choose a smaller slot_bytes or fewer ranks"
        )
    return length
