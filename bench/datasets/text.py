"""Text: your own files as bytes, for models that predict each byte from the bytes before it: `text:path=FOLDER`."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import fnmatch
import functools
import os
import re
import stat
import sysconfig
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from torch.nn import functional
from typing_extensions import Doc, override

from bench.datasets.base import Dataset, DatasetError, Samples, Task
from bench.datasets.corpus import Corpus, Files, corpus_of
from bench.datasets.folders import find_files, note_of

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


class AbsentText(DatasetError):
    """The text does not exist."""


@dataclasses.dataclass(kw_only=True)
class TextDataset(Dataset, abc.ABC):
    """Base of texts: samples are windows of bytes that do not overlap, and the target of each byte is the next byte.

    The files are split into training and held-out text, and joined in the order of their names. The inputs and targets
    of all windows are two views of one tensor, whose memory all processes of a machine share (`Corpus`).
    """

    task: ClassVar[Task] = LanguageModelling()
    keeps_samples: ClassVar[bool] = True
    num_classes: ClassVar[int] = 256

    context: Annotated[int, Ge(8), Le(65_536), Doc("bytes in a window; each is predicted from earlier bytes")] = 128
    hash: Annotated[str, Doc("first 12 digits of the SHA-256 of file names, contents and sides; any: not checked")] = (
        "any"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        with contextlib.suppress(AbsentText):  # `resolve_sizes` reports this error
            self.corpus.check_hash(self.hash)
            self.hash = self.corpus.hash

    @abc.abstractmethod
    def _files(self) -> Files:
        """Return the text's files, as they are now.

        Raises:
            AbsentText: there is no such text; the message is one sentence for the user.
        """

    @functools.cached_property
    def corpus(self) -> Corpus:
        """Return the text that the files contain.

        Raises:
            DatasetError: there are no files, or one cannot be read; the message is one sentence for the user.
        """
        corpus = corpus_of(self._files())
        if not corpus.sizes:
            reasons = note_of(", and it", corpus.left_out)
            raise AbsentText(
                f"{corpus.folder} has no file of UTF-8 text{''.join(reasons)}; give another --dataset or folder"
            )
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
        return dict(self.corpus.yardsticks)

    @override
    def warnings(self) -> list[str]:
        notes = note_of(self.component_name, self.corpus.left_out)
        share = self.corpus.nbytes[1] / sum(self.corpus.nbytes)
        if not LEAST_HELD_OUT <= share <= MOST_HELD_OUT:
            notes.append(f"{share:.0%} of the text is held out, because its files are few or of very different sizes")
        if len(self.corpus.sizes) > 1 and not self.corpus.held_out:
            notes.append("all files share much text with others, so the last tenth of the whole text is held out")
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
        with contextlib.suppress(AbsentText):
            return bool(self.corpus)
        return False

    @override
    def status(self, data_dir: Path) -> str:
        try:
            corpus = self.corpus
        except AbsentText as reason:
            return str(reason)
        left_out = f", {len(corpus.left_out)} left out" if corpus.left_out else ""
        return f"{len(corpus.sizes)} files{left_out}, {sum(corpus.nbytes):,} bytes, hash {corpus.hash}"

    @override
    def prepare(self, data_dir: Path) -> None:
        _ = self.corpus  # raises an error that says what is missing

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        sizes = self.resolve_sizes(train_size, test_size)
        corpus = corpus_of(self._files())
        corpus.check_hash(self.hash)
        corpus.check_content()
        texts = torch.frombuffer(corpus.content, dtype=torch.uint8, count=sum(corpus.nbytes)).split(corpus.nbytes)
        train, test = (self._windows(text).subset(size) for text, size in zip(texts, sizes, strict=True))
        return train, test

    def _windows(self, text: torch.Tensor) -> Samples:
        end = (len(text) - 1) // self.context * self.context
        return Samples(inputs=text[:end].view(-1, self.context), targets=text[1 : end + 1].view(-1, self.context))


@dataclasses.dataclass(kw_only=True)
class Text(TextDataset):
    """All regular files below a folder that contain UTF-8 text; a note says which files are left out and why.

    Links are followed, and a file that is reached several times counts once. Hidden files and folders, and results of
    `bench`, are left out.

    About a 14th is held out, in whole files, so that copies stay on one side. If there is only one file, its last tenth
    is held out.
    """

    path: Annotated[str, Doc("the folder with the files, which may be in subfolders")] = "text"

    @override
    def _files(self) -> Files:
        folder = Path(self.path).absolute()
        try:
            if folder.is_dir():
                return Files(folder, "all", *find_files(folder))
            reason = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        except OSError as error:
            reason = f"{folder} cannot be read ({error.strerror})"
        raise AbsentText(f"{reason}; give a folder of text files with text:path=FOLDER")


# Left out: tests, other projects' packages, and files that differ between machines with the same Python version.
_NOT_LIBRARY = re.compile(
    "|".join(
        fnmatch.translate(pattern)
        for pattern in (
            *("test", "tests", "idle_test", "conftest.py", "test_*.py", "*_test.py"),
            *("site-packages", "__pycache__", "config-*", "_sysconfigdata*", "__editable__*"),
        )
    )
)


def is_library(name: str) -> bool:
    """Return True if a file or folder with this name can be part of a library, without tests."""
    return not _NOT_LIBRARY.match(name)


@dataclasses.dataclass(kw_only=True)
class Stdlib(TextDataset, name="stdlib"):
    """Stdlib: source text of the running Python's standard library without its tests, as bytes.

    About a 14th is held out, in whole files, so that copies stay on one side. The text differs between versions of
    Python, so runs with different versions are different experiments.
    """

    @override
    def _files(self) -> Files:
        folder = Path(sysconfig.get_path("stdlib"))
        found = []
        for parent, folders, files in os.walk(folder):
            folders[:] = filter(is_library, folders)
            for name in files:
                path = Path(parent, name)
                facts = path.lstat()  # leaves out links, because they lead to other files of this machine
                if path.suffix == ".py" and is_library(name) and stat.S_ISREG(facts.st_mode) and facts.st_size:
                    found.append((path.relative_to(folder).as_posix(), facts.st_size, facts.st_mtime_ns))
        return Files(folder, "library", tuple(sorted(found)))
