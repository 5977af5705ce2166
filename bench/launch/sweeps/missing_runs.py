"""Runs that are missing are done, each once, however many sweeps are at work on one folder.

Who does a run holds the lock of a file named after its digest, and looks again whether it is missing before it begins.
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
    """Do the runs that are missing, in order; those that another sweep is at are waited for at the end.

    Args:
        configs: the runs; each is missing in `seen`, or it failed and is to be done again.
        out: where runs lie.
        seen: the runs that lay there when this was decided, by digest.
        train: does one run, or goes on with the one in the folder; what it raises ends all of this.

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
    """Whether nobody has come to an end with the run since."""
    now = by_digest(past_runs(out, digest)).get(digest)
    if now is None or now.state == "torn":
        return True
    before = seen.get(digest)
    if before is None or before.state != "failed":
        return False
    return (before.folder.path, before.resumed) == (now.folder.path, now.resumed)  # one that goes on keeps its folder


def _make_locks(out: Path) -> Path:
    try:
        (out / _LOCKS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"cannot write results to {out}: {reason}; choose another folder with --out") from None
    return out / _LOCKS
