"""Execute the missing runs of a sweep, each once, even if several sweeps work on the same folder.

A sweep that executes a run holds the lock of a file named after the run's digest. After it gets the lock, it checks
again that the run is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.locks import locked
from bench.core.run_folder import RunFolder
from bench.launch.sweeps.past_runs import PastRun, by_digest, past_runs, take_up

_LOCKS = ".locks"


def run_missing(
    configs: Iterable[RunConfig],
    out: Path,
    seen: Mapping[str, PastRun],
    train: Callable[[RunConfig, RunFolder | None], None],
) -> None:
    """Execute the missing runs in order; at the end, wait for those that another sweep is executing.

    Args:
        configs: the runs; each is missing in `seen`, or failed and is to be executed again.
        out: folder of the runs.
        seen: runs that the folder held when `configs` were chosen, by digest.
        train: executes one run, or resumes the one in the given folder; its exceptions end the sweep.

    Raises:
        UsageError: `out` cannot be written.
    """
    locks = _make_locks(out)

    def is_settled(config: RunConfig, *, wait: bool) -> bool:
        lock = locks / config.digest
        lock.touch()
        with locked(lock, wait=wait) as is_held:
            if is_held and _is_missing(out, config.digest, seen):
                train(config, take_up(out, config.digest))
        return is_held

    elsewhere = [config for config in configs if not is_settled(config, wait=False)]
    for config in elsewhere:
        is_settled(config, wait=True)


def _is_missing(out: Path, digest: str, seen: Mapping[str, PastRun]) -> bool:
    """Return whether no sweep has finished the run since `seen` was read."""
    now = by_digest(past_runs(out, digest)).get(digest)
    if now is None or now.state == "torn":
        return True
    before = seen.get(digest)
    if before is None or before.state != "failed":
        return False
    return (before.folder.path, before.resumed) == (now.folder.path, now.resumed)  # a resumed run keeps its folder


def _make_locks(out: Path) -> Path:
    try:
        (out / _LOCKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot write results to {out}: {reason}; choose another folder with --out") from None
    return out / _LOCKS
