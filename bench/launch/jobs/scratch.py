"""A temporary folder for a job that writes its results elsewhere; it is kept only if the job fails, for its logs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.core.errors import RunFailed
from bench.core.run_folder import RunFolder
from bench.launch.jobs.stale_jobs import noted


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[RunFolder]:
    """Make a temporary folder for the job in the block, and remove it afterwards.

    Args:
        command: name of the command, part of the folder's name.

    Raises:
        RunFailed: the block raised it; the folder is kept, and its path is added to the message.
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
