"""Text: your own files as bytes, for models that predict each byte from the bytes before it: `text:path=FOLDER`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import os
import stat
import sysconfig
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch.nn import functional
from typing_extensions import Doc, override

from bench.core.functions import HASH_DIGITS
from bench.datasets.base import Dataset, DatasetError, Samples, Task
from bench.datasets.folders import UNREADABLE, LeftOut, Listing, find_files, note_of, shown

# If the held-out share of a text's bytes is outside of these limits, a note says how much is held out.
LEAST_HELD_OUT, MOST_HELD_OUT = 0.02, 0.25


class LanguageModelling(Task):
    """Prediction of the next byte: cross-entropy of logits [n, context, 256] against bytes, integers [n, context]."""

    metric = "test_bits_per_byte"

    @override
    def loss(self, outputs: torch.Tensor, targets: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        logits, following = outputs.flatten(0, 1), targets.flatten().long()
        return functional.cross_entropy(logits, following, label_smoothing=label_smoothing)

    @override
    def sum_loss_and_correct(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten().long(), reduction="none")
        return losses.double().sum(), (outputs.argmax(2) == targets).sum()

    @override
    def output_error(self, outputs: object, num_samples: int, num_classes: int) -> str:
        if not isinstance(outputs, torch.Tensor):
            return f"returns {type(outputs).__name__} instead of a tensor of logits"
        if outputs.dim() != 3 or (outputs.shape[0], outputs.shape[2]) != (num_samples, num_classes):
            shape = "x".join(map(str, outputs.shape))
            return (
                f"returns {shape} for {num_samples} samples instead of {num_samples} x context x {num_classes} logits"
            )
        return ""


@dataclasses.dataclass(kw_only=True)
class TextDataset(Dataset, abc.ABC):
    """Base of texts: samples are windows of bytes that do not overlap, and the target of each byte is the next byte.

    The files are split into training and held-out text, and joined in the order of their names. A text is kept in
    memory as bytes: the inputs and targets of all windows are two views of one tensor, which the ranks of a machine
    share.
    """

    task: ClassVar[Task] = LanguageModelling()
    num_classes: ClassVar[int] = 256

    context: Annotated[int, Ge(8), Le(65_536), Doc("bytes in a window; each is predicted from earlier bytes")] = 128
    hash: Annotated[str, Doc("first 12 digits of the SHA-256 of file names and contents; any: not checked")] = "any"

    def __post_init__(self) -> None:
        super().__post_init__()
        with contextlib.suppress(_Absent):  # `resolve_sizes` reports this error
            self.corpus.check_hash(self.hash)
            self.hash = self.corpus.hash

    @abc.abstractmethod
    def _files(self) -> tuple[Path, Listing, LeftOut]:
        """Return (the folder that contains the text, the text's files, what is left out)."""

    @functools.cached_property
    def corpus(self) -> Corpus:
        """Return the text's files, which are read only once per process.

        Raises:
            DatasetError: there are no files, or one cannot be read; the message is one sentence for the user.
        """
        folder, *files = self._files()
        corpus = _scanned(folder, *files)
        if not corpus.names:
            reasons = note_of(", and it", corpus.left_out)
            raise _Absent(f"{folder} has no file of UTF-8 text{''.join(reasons)}; give another --dataset or folder")
        return corpus

    @override
    def dummy_batch(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return torch.zeros(num_samples, self.context, dtype=torch.int64, device=device)

    @override
    def dummy_targets(self, num_samples: int, device: torch.device | str) -> torch.Tensor:
        return self.dummy_batch(num_samples, device)

    @override
    def normalise(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.long()

    @override
    def yardsticks(self) -> dict[str, float]:
        return dict(_compressed(self.corpus))

    @override
    def warnings(self) -> list[str]:
        notes = note_of(self.component_name, self.corpus.left_out)
        share = self.corpus.nbytes[1] / sum(self.corpus.nbytes)
        if not LEAST_HELD_OUT <= share <= MOST_HELD_OUT:
            notes.append(f"{share:.0%} of the text is held out, because its files are few or of very different sizes")
        return notes

    @override
    def sizes(self) -> tuple[int, int]:
        if not self.is_present(Path()):
            return 0, 0
        train, test = (max(0, nbytes - 1) // self.context for nbytes in self.corpus.nbytes)
        return train, test

    @override
    def resolve_sizes(self, train_size: int | None, test_size: int | None) -> tuple[int, int]:
        for kind, nbytes in zip(("training", "held-out"), self.corpus.nbytes, strict=True):
            if nbytes <= self.context:
                raise DatasetError(
                    f"the {kind} text of {self.corpus.folder} has {nbytes} bytes, which are not enough for a window "
                    f"of context={self.context} and the byte after it; give more text, or a smaller context"
                )
        return super().resolve_sizes(train_size, test_size)

    @override
    def is_present(self, data_dir: Path) -> bool:
        with contextlib.suppress(_Absent):
            return bool(self.corpus)
        return False

    @override
    def status(self, data_dir: Path) -> str:
        try:
            corpus = self.corpus
        except _Absent as reason:
            return str(reason)
        left_out = f", {len(corpus.left_out)} left out" if corpus.left_out else ""
        return f"{len(corpus.names)} files{left_out}, {sum(corpus.nbytes):,} bytes, hash {corpus.hash}"

    @override
    def prepare(self, data_dir: Path) -> None:
        _ = self.corpus  # raises an error that says what is missing

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        sizes = self.resolve_sizes(train_size, test_size)
        train, test = (
            self._windows(torch.frombuffer(text, dtype=torch.uint8)).subset(size)
            for text, size in zip(self.corpus.read(), sizes, strict=True)
        )
        return train, test

    def _windows(self, text: torch.Tensor) -> Samples:
        end = (len(text) - 1) // self.context * self.context
        return Samples(inputs=text[:end].view(-1, self.context), targets=text[1 : end + 1].view(-1, self.context))


@dataclasses.dataclass(kw_only=True)
class Text(TextDataset):
    """All regular files below a folder that contain UTF-8 text; a note says which files are left out and why.

    Links are followed, and a file that is reached several times counts once. Hidden files and folders, and results of
    `bench`, are left out.

    About one file in 14 is held out, chosen by a hash of its name. If there is only one file, its last tenth is held
    out.
    """

    path: Annotated[str, Doc("the folder with the files, which may be in subfolders")] = "text"

    @override
    def _files(self) -> tuple[Path, Listing, LeftOut]:
        folder = Path(self.path).absolute()
        try:
            if folder.is_dir():
                return folder, *find_files(folder)
            reason = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        except OSError as error:
            reason = f"{folder} cannot be read ({error.strerror})"
        raise _Absent(f"{reason}; give a folder of text files with text:path=FOLDER")


# Left out: tests, other projects' packages, and files that differ between machines with the same Python version.
_NOT_LIBRARY = ("test", "tests", "idle_test", "site-packages", "__pycache__", "config-*", "_sysconfigdata*")


@dataclasses.dataclass(kw_only=True)
class Stdlib(TextDataset, name="stdlib"):
    """Stdlib: source text of the running Python's standard library without its tests, as bytes.

    About one file in 14 is held out, chosen by a hash of its name. The text differs between versions of Python, so runs
    with different versions are different experiments.
    """

    @override
    def _files(self) -> tuple[Path, Listing, LeftOut]:
        folder = Path(sysconfig.get_path("stdlib"))
        found = []
        for parent, folders, files in os.walk(folder):
            folders[:] = filter(_is_library, folders)
            for name in files:
                path = Path(parent, name)
                facts = path.lstat()  # leaves out links, because they lead to other files of this machine
                if path.suffix == ".py" and _is_library(name) and stat.S_ISREG(facts.st_mode) and facts.st_size:
                    found.append((path.relative_to(folder).as_posix(), facts.st_size, facts.st_mtime_ns))
        return folder, tuple(sorted(found)), ()


def _is_library(name: str) -> bool:
    return not any(fnmatch(name, pattern) for pattern in _NOT_LIBRARY)


class _Absent(DatasetError):
    """The text does not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The files of a text, as they were found.

    Attributes:
        folder: the folder that contains the files.
        names: the files' names relative to `folder`, sorted.
        left_out: (reason, name) of each file and folder that is not part of the text, sorted.
        hash: first hexadecimal digits of the SHA-256 of the files' names and contents.
        nbytes: (bytes of the training text, bytes of the held-out text).
    """

    folder: Path
    names: Sequence[str]
    left_out: LeftOut
    hash: str
    nbytes: tuple[int, int]

    def check_hash(self, expected: str) -> None:
        """Raise DatasetError if the text's hash is not `expected`; "any" accepts every text."""
        if expected not in ("any", self.hash):
            raise DatasetError(
                f"the text in {self.folder} has the hash {self.hash} instead of {expected}, so it has changed; restore "
                "it, or leave out hash and start a new run"
            )

    def read(self) -> tuple[bytearray, bytearray]:
        """Return (training text, held-out text).

        Raises:
            DatasetError: a file has changed since it was found, or cannot be read any more.
        """
        digest = hashlib.sha256()
        texts = bytearray(), bytearray()
        held_out = held_out_among(self.names)
        for name in self.names:
            try:
                content = (self.folder / name).read_bytes()
            except OSError as error:
                path = shown(str(self.folder / name))
                raise DatasetError(f"{path} could be read before, but not now ({error.strerror}); restore it") from None
            _add(digest, name, content)
            texts[name in held_out].extend(content)
        dataclasses.replace(self, hash=digest.hexdigest()[:HASH_DIGITS]).check_hash(self.hash)
        if len(self.names) > 1:
            return texts
        return texts[0][: self.nbytes[0]], texts[0][self.nbytes[0] :]


def held_out_among(names: Sequence[str]) -> set[str]:
    """Return the names of the files that are held out: about one in 14, at least one, never all."""
    # The salt matters: without it, the standard library's largest file, which is not code, would be half of the
    # held-out text.
    place_of = {
        name: int.from_bytes(hashlib.sha256(b"held out " + _bytes(name)).digest()[:8]) / 2**64 for name in names
    }
    first, *others = sorted(names, key=place_of.__getitem__)
    return {first, *(name for name in others[:-1] if place_of[name] < 1 / 14)} if others else set()


@functools.lru_cache(maxsize=4)  # reading takes a tenth of a second; a file that changes gets another time
def _scanned(folder: Path, listing: Listing, left_out: LeftOut) -> Corpus:
    digest = hashlib.sha256()
    sizes: dict[str, int] = {}
    also_left_out = []
    for name, _, _ in listing:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            also_left_out.append((UNREADABLE, name))
            continue
        if _is_text(content):
            _add(digest, name, content)
            sizes[name] = len(content)
        else:
            also_left_out.append(("without UTF-8 text", name))
    total = sum(sizes.values())
    held_out = sum(sizes[name] for name in held_out_among(list(sizes))) if len(sizes) > 1 else total // 10
    return Corpus(
        folder=folder,
        names=tuple(sizes),
        left_out=tuple(sorted((*left_out, *also_left_out))),
        hash=digest.hexdigest()[:HASH_DIGITS],
        nbytes=(total - held_out, held_out),
    )


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    digest.update(b"%b\0%d\0" % (_bytes(name), len(content)))
    digest.update(content)


def _bytes(name: str) -> bytes:
    return os.fsencode(name)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in content


# By the name in the column: module and options of the compressor.
_COMPRESSORS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "gzip": ("gzip", {"compresslevel": 9}),
    "bz2": ("bz2", {"compresslevel": 9}),
    "xz": ("lzma", {}),
}


@functools.lru_cache(maxsize=1)
def _compressed(corpus: Corpus) -> Mapping[str, float]:
    """Return bits per byte of the held-out text for each of Python's compressors that is installed, by column name."""
    text, found = bytes(corpus.read()[1]), {}
    for name, (module, options) in _COMPRESSORS.items():
        with contextlib.suppress(ImportError):
            size = len(importlib.import_module(module).compress(text, **options))
            found[f"{name}_bits_per_byte"] = 8 * size / len(text)
    return found
