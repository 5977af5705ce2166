"""Memory regions that several ranks map: a file on /dev/shm, another file, or part of a DAX device."""

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
import sys
import uuid
import weakref
from pathlib import Path
from typing import NamedTuple

import torch

from collectives.options import OptionError

SYSFS = Path("/sys")

_LOCK = struct.Struct("hhqqi")  # C's struct flock: type, whence, start, length, process


class DaxDevice(NamedTuple):
    """A DAX device as the kernel describes it.

    Attributes:
        path: path of the device, such as ``/dev/dax0.0``.
        nbytes: size of the device in bytes.
        alignment: offsets and lengths of mappings must be multiples of this number of bytes.
    """

    path: Path
    nbytes: int
    alignment: int


def dax_device(path: Path, sysfs: Path = SYSFS) -> DaxDevice | None:
    """Return the DAX device at this path; None if the kernel lists no such device."""
    facts = sysfs / "bus" / "dax" / "devices" / path.name
    try:
        return DaxDevice(path, int((facts / "size").read_text()), int((facts / "align").read_text()))
    except (OSError, ValueError):
        return None


def dax_devices(sysfs: Path = SYSFS) -> list[DaxDevice]:
    """Return the DAX devices of this machine, sorted by name; `sysfs` is the folder where the kernel lists them."""
    folder = sysfs / "bus" / "dax" / "devices"
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    return [device for name in names if (device := dax_device(Path("/dev") / name, sysfs)) is not None]


def claim(device: DaxDevice, nbytes: int) -> tuple[int, int] | None:
    """Lock `nbytes` bytes of a DAX device that no other memory region of this host uses.

    The kernel keeps the locks of all processes; it releases a process's locks when the process ends.

    Returns:
        (offset of the locked part, file descriptor that holds the lock until it is closed); None if no part is free.

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


# Files without a name that this process created -> file descriptors; open until every rank has mapped the file.
_nameless: dict[Path, int] = {}


class Region:
    """Memory that several processes map; it is released with the last tensor that refers to it.

    Attributes:
        path: the file or device that is mapped.
        memory: uint8 [nbytes], shared with every process that maps the same path.
    """

    def __init__(self, path: Path, nbytes: int, offset: int = 0, claim: int | None = None) -> None:
        """Map an existing file or device.

        Args:
            path: the file or device.
            nbytes: length of the region.
            offset: first byte of the region in the file or device.
            claim: file descriptor that holds the lock on a part of a device; closed when the region is released.

        Raises:
            OSError: the path cannot be opened or mapped.
        """
        self.path = path
        if claim is not None:
            weakref.finalize(self, os.close, claim)
        handle = os.open(path, os.O_RDWR)
        try:
            status = os.fstat(handle)
            self._is_device = stat.S_ISCHR(status.st_mode)
            if not self._is_device and status.st_size < nbytes:
                raise OSError(errno.EINVAL, "it is another file of that name")
            mapping = mmap.mmap(handle, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        finally:
            os.close(handle)
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)

    def remove_name(self) -> None:
        """Delete the name of the region's file; the memory stays mapped. A device file, such as `/dev/dax0.0`, is kept.

        The rank that created the file calls this method once all ranks have mapped the file.
        """
        if not self._is_device:
            _remove(self.path)


class Extent(NamedTuple):
    """The reserved part of a file or device that a region maps; the fields are the arguments of `Region`."""

    path: Path
    nbytes: int
    offset: int = 0
    claim: int | None = None


def reserve(path: Path, nbytes: int, smaller: str, sysfs: Path = SYSFS) -> Extent:
    """Reserve memory for a region, in a new file or on a DAX device.

    Args:
        path: a folder, the name of a new file, or a DAX device. In a folder a file is created, without a name if
            possible, so that no file remains when ranks are killed.
        nbytes: length of the region in bytes.
        smaller: what the error message advises the user to choose if there is not enough memory.
        sysfs: folder in which the kernel describes devices.

    Returns:
        The extent to map.

    Raises:
        OptionError: there is not enough memory, or the path cannot be used.
    """
    if path.is_char_device():
        return _on_device(path, nbytes, smaller, sysfs)
    try:
        file = _make(path)
    except OSError as error:
        raise OptionError(f"pool: path={path} is not possible: {error.strerror}; give a folder or a new file") from None
    try:
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, nbytes)  # without it, writing to a full tmpfs kills the process
    except OSError as error:
        _remove(file)
        raise OptionError(
            f"pool: {path} has no room for {nbytes} bytes ({error.strerror}); choose {smaller} or another path"
        ) from None
    return Extent(file, nbytes)


def _make(path: Path) -> Path:
    """Create an empty file in a folder or at a new path; return a path at which this machine's ranks can open it."""
    if path.is_dir() and sys.platform == "linux":
        with contextlib.suppress(OSError):  # some file systems do not support files without a name
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
    """Return `nbytes` rounded up to a multiple of `alignment`."""
    return -(-nbytes // alignment) * alignment


def _on_device(path: Path, nbytes: int, smaller: str, sysfs: Path) -> Extent:
    device = dax_device(path, sysfs)
    if device is None:
        raise OptionError(f"pool: path={path} is no DAX device; give a folder, a new file or a DAX device")
    length = rounded_up(nbytes, device.alignment)
    try:
        claimed = claim(device, length)
    except OSError as error:
        raise OptionError(f"pool: path={path} is not possible: {error.strerror}") from None
    if claimed is None:
        raise OptionError(
            f"pool: {path} has no room for {length} bytes: it holds {device.nbytes} bytes, less what other regions of "
            f"this host take; choose {smaller} or fewer ranks"
        )
    return Extent(path, length, *claimed)
