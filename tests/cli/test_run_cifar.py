"""`bench run` on a CIFAR-10 archive in the published format: downloaded from loopback, verified, loaded, trained on."""

from __future__ import annotations

import functools
import http.server
import threading
from pathlib import Path

from tests.testing.invoke import execute, only_run, rows
from tests.testing.plugins import install_entry_points
from tests.testing.small_cifar10 import ARCHIVE


def test_the_archive_is_fetched_and_trained_on(tmp_path: Path) -> None:
    install_entry_points(
        tmp_path, "small-cifar", {"bench.datasets": {"small_cifar10": "tests.testing.small_cifar10:SmallCifar10"}}
    )
    served = tmp_path / "served"
    served.mkdir()
    (served / "cifar-10-python.tar.gz").write_bytes(ARCHIVE)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/cifar-10-python.tar.gz"
            answer = execute(
                "run", "--dataset", f"small_cifar10:url={url}", "--data-dir", str(tmp_path / "data"),
                "--model", "linear", "--batch-size", "10", "--epochs", "1", "--out", str(tmp_path / "out"),
                PYTHONPATH=str(tmp_path), no_proxy="127.0.0.1",
            )  # fmt: skip
        finally:
            server.shutdown()
            thread.join()
    assert answer.code == 0, answer.error
    (row,) = rows(only_run(tmp_path / "out"))
    assert (row["train_size"], row["test_size"], row["samples"], row["status"]) == ("100", "20", "100", "ok")
    assert (tmp_path / "data" / "cifar-10-batches-py" / "test_batch").exists()
