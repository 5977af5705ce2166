"""A CIFAR-10 of 120 random images in the published format, and a data set component with its checksums.

The archive is a gzipped tar of pickles as Python 2 and the NumPy of 2009 wrote them: byte strings, and a dtype whose
flags are integers. `SmallCifar10` differs from `Cifar10` only in address, sizes, checksums and a shorter wait, so that
everything else is the real path. It can be imported by name, so a test may offer it to other processes as an entry
point.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import pickle
import tarfile
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torchvision

from bench.datasets.cifar import Cifar10

IMAGES_PER_BATCH = 20
_FOLDER = "cifar-10-batches-py"
_NUM_BATCHES = 6  # five for training, one for testing
_rng = np.random.default_rng(10)
PIXELS = _rng.integers(0, 256, (_NUM_BATCHES * IMAGES_PER_BATCH, 3, 32, 32), dtype=np.uint8)
LABELS = np.concatenate([_rng.permutation(np.arange(IMAGES_PER_BATCH) % 10) for _ in range(_NUM_BATCHES)])


class _Python2Pickler(pickle._Pickler):  # the C pickler does not allow a choice of opcodes
    write: Callable[[bytes], None]
    memoize: Callable[[Any], None]

    def save_python2_str(self, text: bytes) -> None:
        length = len(text)
        head = (
            pickle.SHORT_BINSTRING + bytes([length])
            if length < 256
            else pickle.BINSTRING + length.to_bytes(4, "little")
        )
        self.write(head + text)
        self.memoize(text)

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch, bytes: save_python2_str}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            reconstruct = value.__reduce__()[0]
            state = (1, value.shape, value.dtype, False, value.tobytes())
            return reconstruct, (np.ndarray, (0,), b"b"), state
        if isinstance(value, np.dtype):
            return np.dtype, (b"u1", 0, 1), (3, b"|", None, None, None, -1, -1, 0)
        return NotImplemented


def python2_pickle(value: Any) -> bytes:
    """Return the value pickled as Python 2 did with protocol 2."""
    stream = io.BytesIO()
    _Python2Pickler(stream, protocol=2).dump(value)
    return stream.getvalue().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")


def _batch(index: int) -> bytes:
    part = slice(index * IMAGES_PER_BATCH, (index + 1) * IMAGES_PER_BATCH)
    return python2_pickle(
        {
            b"batch_label": b"batch",
            b"labels": LABELS[part].tolist(),
            b"data": PIXELS[part].reshape(IMAGES_PER_BATCH, -1),
            b"filenames": [b"image.png"] * IMAGES_PER_BATCH,
        }
    )


FILES = {f"data_batch_{index + 1}": _batch(index) for index in range(5)}
FILES["test_batch"] = _batch(5)
FILES["batches.meta"] = python2_pickle({b"label_names": [f"class {label}".encode() for label in range(10)]})


def _pack() -> bytes:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name, content in FILES.items():
            member = tarfile.TarInfo(f"{_FOLDER}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(tar.getvalue(), mtime=0)


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


ARCHIVE = _pack()


class SmallArchive(torchvision.datasets.CIFAR10):  # type: ignore[misc]
    """Torchvision's class with the checksums of the archive above and an address without a server."""

    url = "http://127.0.0.1:9/cifar-10-python.tar.gz"
    tgz_md5 = _md5(ARCHIVE)
    train_list: ClassVar[list[list[str]]] = [[name, _md5(FILES[name])] for name in list(FILES)[:5]]
    test_list: ClassVar[list[list[str]]] = [["test_batch", _md5(FILES["test_batch"])]]
    meta: ClassVar[dict[str, str]] = {
        "filename": "batches.meta",
        "key": "label_names",
        "md5": _md5(FILES["batches.meta"]),
    }


@dataclasses.dataclass(kw_only=True)
class SmallCifar10(Cifar10):
    """100 training and 20 test images: ten and two per class."""

    archive: ClassVar[type[torchvision.datasets.CIFAR10]] = SmallArchive
    whole: ClassVar[tuple[int, int]] = (5 * IMAGES_PER_BATCH, IMAGES_PER_BATCH)
    timeout_s: ClassVar[float] = 0.3
