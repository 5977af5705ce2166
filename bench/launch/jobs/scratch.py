"""Scratch: the folder of a job whose rows go elsewhere; it outlives the job only where its logs say why it failed."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.core.errors import RunFailed
from bench.core.run_folder import RunFolder
from bench.launch.jobs.unfinished import noted


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[RunFolder]:
    """A temporary folder for the job inside the block.

    Args:
        command: the command's name, for the folder's.

    Raises:
        RunFailed: as the block did; the message then names the folder, which is kept.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=f"bench-{command}-")))
    with noted(command, folder.path):
        try:
            folder.errors.mkdir()
            folder.logs.mkdir()
            yield folder
        except RunFailed as error:
            raise RunFailed(f"{error}; logs are in {folder.path}") from None
        except BaseException:
            shutil.rmtree(folder.path)
            raise
        shutil.rmtree(folder.path)
