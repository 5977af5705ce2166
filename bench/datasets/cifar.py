"""Common code of CIFAR-10 and CIFAR-100: download an archive, check it against torchvision's checksums, load it."""

import dataclasses
import errno
import http.client
import socket
import sys
import tarfile
import urllib.parse
import warnings
from pathlib import Path
from typing import Annotated, ClassVar
from urllib.error import URLError

import pydantic
import torch
from torchvision.datasets import CIFAR10, CIFAR100
from torchvision.datasets.utils import calculate_md5, check_integrity, download_url
from typing_extensions import Doc, override

from bench.core.files import check_regular, locked
from bench.datasets.base import DatasetError, ImageDataset, Samples

_WITHOUT_NETWORK = "use --dataset digits or --dataset synthetic, which need no download"
# Errors of `write`, whose exceptions do not contain a file name.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def _checked_address(url: str) -> str:
    """Return `url` unchanged; raise ValueError if its brackets or its port are invalid."""
    _ = urllib.parse.urlsplit(url).port
    return url


@dataclasses.dataclass(kw_only=True)
class CifarArchive(ImageDataset):
    """Loads the images of an archive whose checksums torchvision knows: common code of CIFAR-10 and CIFAR-100.

    Torchvision downloads, verifies and reads the files; only `prepare` uses the network. Every file is verified before
    it is read, so the pickles in it are certainly the published ones, even if they come from a mirror.

    Base of the components `cifar10` and `cifar100`.

    Attributes:
        archive: torchvision's class, which has the names and checksums of the archive and its files, and the address.
        whole: (number of training samples, number of test samples).
        timeout_s: longest wait for the server's next bytes, in seconds.
    """

    mirror: ClassVar[bool] = True
    archive: ClassVar[type[CIFAR10]]
    whole: ClassVar[tuple[int, int]] = (50_000, 10_000)
    timeout_s: ClassVar[float] = 10.0

    url: Annotated[
        Annotated[str, pydantic.StringConstraints(pattern=r"^https?://\S+$"), pydantic.AfterValidator(_checked_address)]
        | None,
        Doc("address of a mirror, from which `bench data prepare` gets the same archive (none: the original address)"),
    ] = None

    @override
    def sizes(self) -> tuple[int, int]:
        return self.whole

    @override
    def status(self, data_dir: Path) -> str:
        if not self._folder(data_dir).exists():
            return self._wrong_archive(data_dir) or f"not prepared; run {self._prepare_command}"
        bad = self._bad_files(data_dir)
        return self._damage(bad) if bad else f"ready in {self._folder(data_dir)}"

    @override
    def is_present(self, data_dir: Path) -> bool:
        return not self._bad_files(data_dir)  # reads all files, which takes half a second

    def prepare(self, data_dir: Path) -> None:
        """Download, verify and extract the archive, unless its extracted files are already complete.

        An archive that already is in `data_dir` is used without a download; if its checksum is wrong, it is not
        replaced.

        Raises:
            DatasetError: there is no network, the server is silent for 10 s, a checksum is wrong, or the files cannot
                be written.
        """
        if self.is_present(data_dir):
            return
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            lock = data_dir / f".{self.component_name}.lock"
            lock.touch()
            with locked(lock, wait=True):  # so that only one of several processes downloads
                if not self.is_present(data_dir):
                    self._fetch_and_extract(data_dir)
        except OSError as error:
            raise DatasetError(
                f"{self.component_name} could not be written to {data_dir}: {error.strerror or error}; make room or "
                f"give another folder with --data-dir, then run {self._prepare_command}"
            ) from error
        if bad := self._bad_files(data_dir):
            raise DatasetError(self._damage(bad))

    @override
    def load(
        self, data_dir: Path, *, seed: int, train_size: int | None = None, test_size: int | None = None
    ) -> tuple[Samples, Samples]:
        train_size, test_size = self.resolve_sizes(train_size, test_size)
        if not self._folder(data_dir).exists():
            raise DatasetError(
                self._wrong_archive(data_dir)
                or f"{self.component_name} is not in {data_dir}; run {self._prepare_command} where there is a network, "
                f"or {_WITHOUT_NETWORK}"
            )
        try:
            train, test = (self._read(data_dir, train=train) for train in (True, False))
        except RuntimeError as error:  # torchvision raises this for a file that is missing or has a wrong checksum
            raise DatasetError(self._damage(self._bad_files(data_dir))) from error
        return train.subset(train_size), test.subset(test_size)

    def _fetch_and_extract(self, data_dir: Path) -> None:
        """Extract the verified archive; download it first if it does not exist.

        Raises:
            DatasetError: the download failed, or the archive is damaged.
            UsageError: the archive's path is something other than a regular file.
            OSError: the files cannot be written.
        """
        path = data_dir / self.archive.filename
        check_regular(path)
        if problem := self._wrong_archive(data_dir):
            raise DatasetError(problem)
        if not path.exists():
            self._download(data_dir, path.with_name(f"{path.name}.part")).rename(path)
        for bad in filter(Path.is_file, self._bad_files(data_dir)):
            print(f"warning: {bad} has a wrong checksum and is replaced", file=sys.stderr)
        with tarfile.open(path) as tar:
            # Python before 3.11.4 has no filters; the archive is safe, because its checksum has been verified
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(data_dir)

    def _download(self, data_dir: Path, path: Path) -> Path:
        url = self.url or self.archive.url
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(self.timeout_s)  # torchvision has no option for a timeout
        try:
            download_url(url, str(data_dir), path.name, self.archive.tgz_md5)
        except (OSError, http.client.HTTPException, RecursionError, ValueError) as error:
            if _is_disk_problem(error):
                raise
            raise DatasetError(
                f"{self.component_name} could not be downloaded from {url}: {self._reason(error)}; check the network "
                f"and run {self._prepare_command}, copy {self.archive.filename} into the folder {data_dir} from "
                f"elsewhere, or {_WITHOUT_NETWORK}"
            ) from error
        except RuntimeError as error:  # torchvision raises this for a wrong checksum
            checksum = calculate_md5(path)
            path.unlink()
            raise DatasetError(
                f"the file from {url} has the MD5 checksum {checksum} instead of {self.archive.tgz_md5}, so it is "
                f"damaged or another one and was not kept; run {self._prepare_command} again, or {_WITHOUT_NETWORK}"
            ) from error
        finally:
            socket.setdefaulttimeout(before)
        return path

    def _reason(self, error: Exception) -> str:
        """Return a few words for an error message: the reason why the download failed."""
        cause = error.reason if isinstance(error, URLError) and isinstance(error.reason, Exception) else error
        if isinstance(cause, TimeoutError):
            return f"the server was silent for {self.timeout_s:g} s"
        return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__

    def _read(self, data_dir: Path, *, train: bool) -> Samples:
        with warnings.catch_warnings():
            # The published pickles contain a dtype of an old NumPy version, about which NumPy 2.4.0 to 2.4.4 warn.
            warnings.filterwarnings("ignore", message=r"dtype\(\): align should be passed")
            source = self.archive(str(data_dir), train=train)
        return Samples(
            inputs=torch.from_numpy(source.data).permute(0, 3, 1, 2).contiguous(),
            targets=torch.tensor(source.targets, dtype=torch.int64),
        )

    @property
    def _prepare_command(self) -> str:
        return f"`bench data prepare {self.component_name}`"

    def _wrong_archive(self, data_dir: Path) -> str | None:
        """Return a message about an archive in `data_dir` with a wrong checksum; None if there is no such archive."""
        path, published = data_dir / self.archive.filename, self.archive.tgz_md5
        if not path.is_file() or (found := calculate_md5(path)) == published:
            return None
        return (
            f"{path} has the MD5 checksum {found} instead of {published}, so it is damaged or another file; move it "
            f"elsewhere and run {self._prepare_command}"
        )

    def _folder(self, data_dir: Path) -> Path:
        return data_dir / str(self.archive.base_folder)

    def _bad_files(self, data_dir: Path) -> list[Path]:
        """Return the archive's extracted files that are missing or have a wrong checksum."""
        archive = self.archive
        files = [*archive.train_list, *archive.test_list, (archive.meta["filename"], archive.meta["md5"])]
        folder = self._folder(data_dir)
        return [folder / name for name, md5 in files if not check_integrity(folder / name, md5)]

    def _damage(self, bad: list[Path]) -> str:
        problem, remedy = ("has a wrong checksum", "delete it and run") if bad[0].exists() else ("is missing", "run")
        others = f" (and {len(bad) - 1} more files are missing or damaged)" if len(bad) > 1 else ""
        return f"{bad[0]} {problem}{others}; {remedy} {self._prepare_command}"


def _is_disk_problem(error: Exception) -> bool:
    """Return True if the error comes from writing the archive's file and not from the network."""
    return (
        isinstance(error, OSError)
        and not isinstance(error, URLError)
        and (error.filename is not None or error.errno in _DISK_ERRORS)
    )


@dataclasses.dataclass(kw_only=True)
class Cifar10(CifarArchive, name="cifar10"):
    """CIFAR-10: 60 000 photographs of 32x32 pixels in ten classes, downloaded once by `bench data prepare cifar10`.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), section 3.

    Loads CIFAR-10: 50 000 training and 10 000 test images, normalised by statistics of the training part.
    """

    num_classes: ClassVar[int] = 10
    mean: ClassVar[tuple[float, float, float]] = (0.4914, 0.4822, 0.4465)
    std: ClassVar[tuple[float, float, float]] = (0.2470, 0.2435, 0.2616)
    archive: ClassVar[type[CIFAR10]] = CIFAR10


@dataclasses.dataclass(kw_only=True)
class Cifar100(CifarArchive, name="cifar100"):
    """CIFAR-100: 60 000 photographs of 32x32 pixels in 100 classes, downloaded by `bench data prepare cifar100`.

    Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), section 3; with the fine labels.

    Loads CIFAR-100: 50 000 training and 10 000 test images, normalised by statistics of the training part.
    """

    num_classes: ClassVar[int] = 100
    mean: ClassVar[tuple[float, float, float]] = (0.5071, 0.4865, 0.4409)
    std: ClassVar[tuple[float, float, float]] = (0.2673, 0.2564, 0.2762)
    archive: ClassVar[type[CIFAR10]] = CIFAR100
