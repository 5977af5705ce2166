"""The CIFAR archives on the real path: downloaded from a server on loopback, verified, extracted and read."""

from __future__ import annotations

import errno
import functools
import hashlib
import http.server
import pickletools
import re
import socket
import tarfile
import threading
import urllib.error
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torchvision
from torchvision.datasets.utils import calculate_md5

from bench.core import spec
from bench.core.errors import UsageError
from bench.datasets import cifar
from bench.datasets.base import DatasetError
from bench.datasets.cifar import Cifar10, Cifar100
from tests.testing.small_cifar10 import ARCHIVE, FILES, LABELS, PIXELS, SmallArchive, SmallCifar10, python2_pickle

ALTERNATIVES = "use --dataset digits or --dataset synthetic"
COMMAND = "run `bench data prepare small_cifar10`"


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


class Server(http.server.ThreadingHTTPServer):
    """A server that answers every request with `content`; after `stall_after` bytes it only stays connected."""

    daemon_threads = True
    content = ARCHIVE
    announced: int | None = None
    stall_after: int | None = None
    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/cifar-10-python.tar.gz"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(self.server.announced or len(self.server.content)))
        self.end_headers()
        try:
            self.wfile.write(self.server.content[: self.server.stall_after])
        except ConnectionError:
            return  # torchvision first asks for the address after redirects, and does not read the answer
        if self.server.stall_after is not None:
            self.server.released.wait(10)

    def log_message(self, *args: object) -> None:
        """Do nothing, to keep the test's output readable."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.released.set()
        running.shutdown()
        thread.join()


@pytest.fixture
def prepared(server: Server, tmp_path: Path) -> Path:
    SmallCifar10(url=server.url).prepare(tmp_path)
    return tmp_path


@pytest.fixture
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_downloads_verifies_and_loads_the_published_pixels(server: Server, tmp_path: Path) -> None:
    dataset = SmallCifar10(url=server.url)
    assert not dataset.is_present(tmp_path)
    assert dataset.status(tmp_path) == f"not prepared; {COMMAND}"

    dataset.prepare(tmp_path)

    assert dataset.is_present(tmp_path)
    assert dataset.status(tmp_path) == f"ready in {tmp_path}/cifar-10-batches-py"
    train, test = dataset.load(tmp_path, seed=1)
    assert (train.inputs.dtype, train.targets.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(torch.cat([train.inputs, test.inputs]), torch.from_numpy(PIXELS))
    assert torch.equal(torch.cat([train.targets, test.targets]), torch.from_numpy(LABELS))
    assert train.inputs.is_contiguous()


def test_of_two_at_once_one_downloads(server: Server, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    SmallCifar10(url=server.url).prepare(alone)
    requests, server.requests = server.requests, 0
    together = tmp_path / "together"
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(SmallCifar10(url=server.url).prepare, together) for _ in range(4)]:
            done.result()
    assert SmallCifar10().is_present(together)
    assert server.requests == requests


def test_small_archive_has_the_opcodes_of_python_2() -> None:
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(FILES["data_batch_1"])}
    assert {"SHORT_BINSTRING", "BINSTRING", "GLOBAL"} <= opcodes
    assert not {"BINUNICODE", "SHORT_BINBYTES", "STACK_GLOBAL"} & opcodes


@pytest.mark.usefixtures("_offline")
def test_the_original_is_asked_where_no_mirror_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []

    def download(url: str, folder: str, name: str, md5: str) -> None:
        asked.append((url, folder, name, md5))
        tarfile.open(Path(folder) / name, "w:gz").close()

    monkeypatch.setattr(cifar, "download_url", download)
    with pytest.raises(DatasetError, match="is missing"):
        Cifar10().prepare(tmp_path)
    original = torchvision.datasets.CIFAR10
    assert asked == [(original.url, str(tmp_path), f"{original.filename}.part", original.tgz_md5)]


def test_load_and_a_second_prepare_leave_the_network_alone(
    prepared: Path, request: pytest.FixtureRequest, server: Server
) -> None:
    request.getfixturevalue("_offline")
    SmallCifar10().prepare(prepared)
    train, test = SmallCifar10().load(prepared, seed=1, train_size=50, test_size=10)
    assert train.targets.bincount().tolist() == [5] * 10
    assert test.targets.bincount().tolist() == [1] * 10


@pytest.mark.usefixtures("_offline")
def test_an_archive_put_there_by_hand_needs_no_network(tmp_path: Path) -> None:
    (tmp_path / SmallArchive.filename).write_bytes(ARCHIVE)
    SmallCifar10().prepare(tmp_path)
    assert len(SmallCifar10().load(tmp_path, seed=1)[0]) == 100


@pytest.mark.usefixtures("_offline")
def test_load_of_an_absent_set_names_the_command_and_the_alternatives(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"small_cifar10 is not in .*; {COMMAND} .*{ALTERNATIVES}"):
        SmallCifar10().load(tmp_path, seed=1)


def test_a_server_that_never_answers_or_stalls_in_the_middle_is_given_up(server: Server, tmp_path: Path) -> None:
    server.stall_after = 1000
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in (f"http://127.0.0.1:{silent.getsockname()[1]}/x.tar.gz", server.url):
            with pytest.raises(DatasetError, match=r"the server was silent for 0.3 s"):
                SmallCifar10(url=url).prepare(tmp_path)
    assert socket.getdefaulttimeout() is None
    server.stall_after = None
    SmallCifar10(url=server.url).prepare(tmp_path)  # the remains of the stalled download do not matter


def test_a_refused_connection_and_a_page_that_does_not_exist_are_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"127.0.0.1:9/.*: Connection refused; .*{COMMAND}.*{ALTERNATIVES}"):
        SmallCifar10().prepare(tmp_path)
    server.status = 404
    with pytest.raises(DatasetError, match=r"HTTP Error 404: Not Found; check the network"):
        SmallCifar10(url=server.url).prepare(tmp_path)


def test_real_downloads_wait_ten_seconds() -> None:
    assert (Cifar10.timeout_s, Cifar100.timeout_s) == (10, 10)


@pytest.mark.parametrize("damage", ["one bit", "cut", "connection lost"])
def test_a_damaged_download_is_told_with_its_checksum_and_not_kept(server: Server, tmp_path: Path, damage: str) -> None:
    if damage == "one bit":
        server.content = ARCHIVE[:5000] + bytes([ARCHIVE[5000] ^ 1]) + ARCHIVE[5001:]
    else:
        server.content = ARCHIVE[:5000]
        server.announced = len(ARCHIVE) if damage == "connection lost" else None
    sent = hashlib.md5(server.content, usedforsecurity=False).hexdigest()
    with pytest.raises(
        DatasetError,
        match=rf"the file from {server.url} has the MD5 checksum {sent} instead of {SmallArchive.tgz_md5}, .*"
        rf"{COMMAND} again, or {ALTERNATIVES}",
    ):
        SmallCifar10(url=server.url).prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".small_cifar10.lock"]

    server.content, server.announced = ARCHIVE, None
    SmallCifar10(url=server.url).prepare(tmp_path)
    assert SmallCifar10().is_present(tmp_path)


@pytest.mark.usefixtures("_offline")
def test_an_archive_of_the_users_that_is_another_one_is_named_and_stays(tmp_path: Path) -> None:
    archive = tmp_path / SmallArchive.filename
    archive.write_bytes(b"my own")
    found = hashlib.md5(b"my own", usedforsecurity=False).hexdigest()
    sentence = f"{archive} has the MD5 checksum {found} instead of {SmallArchive.tgz_md5}, "
    assert SmallCifar10().status(tmp_path).startswith(sentence)
    for command in (SmallCifar10().prepare, functools.partial(SmallCifar10().load, seed=1)):
        with pytest.raises(DatasetError, match=rf"^{sentence}.*move it elsewhere and {COMMAND}$"):
            command(tmp_path)
    assert archive.read_bytes() == b"my own"


def test_an_archive_that_is_a_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / SmallArchive.filename).symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="is not a regular file"):
        SmallCifar10().prepare(tmp_path)


@pytest.mark.parametrize("name", ["data_batch_3", "test_batch", "batches.meta"])
def test_a_damaged_file_is_named_and_restored_from_the_archive(
    prepared: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = prepared / "cifar-10-batches-py" / name
    path.write_bytes(FILES[name][:-1] + b"?")
    message = rf"{path} has a wrong checksum; delete it and {COMMAND}"
    with pytest.raises(DatasetError, match=message):
        SmallCifar10().load(prepared, seed=1)
    assert not SmallCifar10().is_present(prepared)
    assert SmallCifar10().status(prepared).startswith(f"{path} has a wrong checksum")

    SmallCifar10().prepare(prepared)
    assert path.read_bytes() == FILES[name]
    assert f"warning: {path} has a wrong checksum and is replaced" in capsys.readouterr().err


def test_missing_files_are_counted(prepared: Path) -> None:
    for name in ("data_batch_2", "data_batch_4", "batches.meta"):
        (prepared / "cifar-10-batches-py" / name).unlink()
    assert SmallCifar10().status(prepared) == (
        f"{prepared}/cifar-10-batches-py/data_batch_2 is missing (and 2 more files are missing or damaged); {COMMAND}"
    )


def test_what_cannot_be_written_is_told_apart_from_the_network(server: Server, tmp_path: Path) -> None:
    full, file, taken = tmp_path / "full", tmp_path / "file", tmp_path / "taken"
    file.touch()
    for folder in (full, taken):
        folder.mkdir()
    (full / f"{SmallArchive.filename}.part").symlink_to("/dev/full")
    (taken / "cifar-10-batches-py").touch()
    for folder, reason in (
        (full, "No space left on device; make room"),
        (file, "File exists; .*--data-dir"),
        (taken, ""),  # the archive cannot be extracted
    ):
        with pytest.raises(DatasetError, match=rf"could not be written to {folder}: {reason}"):
            SmallCifar10(url=server.url).prepare(folder)


@pytest.mark.parametrize(
    ("error", "is_disk"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (PermissionError(errno.EACCES, "Permission denied", "data/x.tar.gz"), True),
        (OSError(errno.EHOSTUNREACH, "No route to host"), False),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (urllib.error.URLError(OSError(errno.ENOSPC, "No space")), False),
    ],
)
def test_disk_errors_are_those_of_files(
    error: OSError, is_disk: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(cifar, "download_url", download)
    with pytest.raises(DatasetError) as told:
        SmallCifar10().prepare(tmp_path)
    assert ("could not be written to" in str(told.value)) is is_disk


def test_numpys_complaint_about_the_published_files_is_not_shown(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Complaining(SmallArchive):
        def __init__(self, *args: object, **kwargs: object) -> None:
            warnings.warn("dtype(): align should be passed as Python or NumPy boolean but got `align=0`.", stacklevel=2)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(SmallCifar10, "archive", Complaining)
    SmallCifar10().load(prepared, seed=1)


def test_too_many_samples_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="has 100 training samples, so 101 are not possible"):
        SmallCifar10().load(tmp_path, seed=1, train_size=101)


def test_cifar100_is_read_by_its_fine_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = torchvision.datasets.CIFAR100
    assert Cifar100.archive is published
    assert (Cifar100.num_classes, Cifar100().sizes()) == (100, (50_000, 10_000))
    assert Cifar100().status(tmp_path) == "not prepared; run `bench data prepare cifar100`"

    files = {
        "train": {b"data": PIXELS[:3].reshape(3, -1), b"fine_labels": [7, 99, 0], b"coarse_labels": [1, 1, 1]},
        "test": {b"data": PIXELS[3:4].reshape(1, -1), b"fine_labels": [42], b"coarse_labels": [2]},
        "meta": {b"fine_label_names": [b"apple"]},
    }
    (tmp_path / published.base_folder).mkdir()
    for name, content in files.items():
        (tmp_path / published.base_folder / name).write_bytes(python2_pickle(content))
    md5 = {name: calculate_md5(tmp_path / published.base_folder / name) for name in files}
    monkeypatch.setattr(published, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(published, "test_list", [["test", md5["test"]]])
    monkeypatch.setitem(published.meta, "md5", md5["meta"])
    monkeypatch.setattr(Cifar100, "whole", (3, 1))

    train, test = Cifar100().load(tmp_path, seed=1)
    assert (train.targets.tolist(), test.targets.tolist()) == ([7, 99, 0], [42])
    assert torch.equal(test.inputs, torch.from_numpy(PIXELS[3:4]))


def test_a_mirror_is_an_option() -> None:
    mirror = "http://127.0.0.1:8000/cifar-10-python.tar.gz"
    assert spec.build("datasets", f"cifar10:url={mirror}").url == mirror  # type: ignore[attr-defined]
    for url in ("ftp://x", "http://[::1/x", "http://x:port/x"):
        with pytest.raises(UsageError, match=re.escape(f"url={url} is not possible")):
            spec.build("datasets", f"cifar10:url={url}")
