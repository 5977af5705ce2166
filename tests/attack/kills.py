"""Jobs of every kind lose a process, or are asked to stop, at a random moment."""

from __future__ import annotations

import csv
import json
import random
import signal
import tempfile
import time
from pathlib import Path

from bench.hosts.support import hosts_supported
from tests.attack.job import Job, free_port
from tests.attack.tally import Tally
from tests.testing.invoke import Answer

SMALL = ("run", "--dataset", "digits", "--model", "linear", "--epochs", "12", "--batch-size", "8", "--timeout", "20")
METHODS = (
    ("--compressor", "none", "--collective", "native"),
    ("--compressor", "none", "--collective", "pool"),
    ("--compressor", "bf16", "--collective", "halving_doubling"),
    ("--compressor", "topk", "--collective", "allgather"),
    ("--compressor", "group_topk", "--collective", "ring", "--trigger", "sync"),
    ("--compressor", "topk", "--collective", "server:downlink=recode"),
    ("--compressor", "group_topk", "--collective", "pool"),
    ("--compressor", "powersgd", "--collective", "tree"),
    ("--compressor", "none", "--collective", "hierarchical"),
    ("--strategy", "async_server:mode=asp", "--compressor", "topk"),
    ("--strategy", "async_server:staleness=2", "--compressor", "none"),
)
PLACEMENTS = {
    "one machine": (("--world-size", "3"),),
    "virtual hosts": (("--hosts", "3", "--bandwidth", "200mbit"),),
    "two launchers": (
        ("--world-size", "2", "--nnodes", "2", "--node-rank", "0"),
        ("--world-size", "2", "--nnodes", "2", "--node-rank", "1"),
    ),
}
LATEST_S = 9.0
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# 0: the job had already ended; 3: it failed with an error message; 130: it was asked to stop.
CODES = (0, 3, 130)


def attack(rng: random.Random, tally: Tally, tries: int) -> None:
    """Start jobs and kill parts of them.

    Args:
        rng: source of all choices.
        tally: gets one count per job.
        tries: number of jobs.
    """
    placements = [name for name in PLACEMENTS if name != "virtual hosts" or hosts_supported()[0]]
    for index in range(tries):
        if not tally.has_time():
            return
        placement = placements[index % len(placements)]
        with tempfile.TemporaryDirectory(prefix="bench-attack-") as folder:
            _one(rng, tally, placement, Path(folder))


def _one(rng: random.Random, tally: Tally, placement: str, folder: Path) -> None:
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}") if placement == "two launchers" else ()
    method = rng.choice(METHODS)
    job = Job(folder, [[*SMALL, *method, *where, *endpoint] for where in PLACEMENTS[placement]])
    try:
        time.sleep(rng.uniform(0, LATEST_S))
        roles = job.roles()
        roles.pop("other", None)
        role = rng.choice(sorted(roles)) if roles else "nobody"
        number = rng.choice(ASKED) if role == "bench" and rng.random() < 0.6 else signal.SIGKILL
        if roles:
            rng.choice(sorted(roles[role], key=lambda process: process.pid)).send_signal(number)
        failure = _failure(job, role, number)
        tally.count(f"{role}, {number.name}, {placement}", failure and f"{failure} [{' '.join(method)}]")
    finally:
        job.close()


def _failure(job: Job, role: str, number: signal.Signals) -> str | None:
    """Return what went wrong after the kill, or None."""
    try:
        answers = job.wait()
    except TimeoutError as error:
        return str(error)
    was_killed = role == "bench" and number == signal.SIGKILL
    codes = [answer.code for answer in answers if not (was_killed and answer.code == -signal.SIGKILL)]
    if wrong := [code for code in codes if code not in CODES]:
        return f"exit codes {wrong}: {answers}"
    if bad := next((answer.error for answer in answers if _is_bad(answer)), None):
        return f"said: {bad}"
    if was_killed:
        answer = job.next_command()
        if answer.code != 0:
            return f"the next command ended with {answer.code}: {answer.error}"
        unnamed = [run.name for run in job.out.glob("*") if not _is_told(run) or run.name not in answer.error]
        if len(unnamed) > len(answers) - 1:  # with two launchers, each has a folder, and only one was killed
            return f"the next command does not name {unnamed}: {answer.error}"
    return next(filter(None, map(_rows_failure, job.out.glob("*"))), None) or ", ".join(job.left()) or None


def _is_bad(answer: Answer) -> bool:
    return "Traceback" in answer.error or "without an error message" in answer.error


def _is_told(run: Path) -> bool:
    return (run / "status.json").exists()


def _rows_failure(run: Path) -> str | None:
    """Return a failure if rows are incomplete, or if the last row and the status disagree on how the run ended."""
    status = json.loads((run / "status.json").read_text(encoding="utf-8"))
    if status["status"] != "ok" and not status["error"]:
        return f"{run.name} is {status['status']} for no reason"
    if (run / "rendezvous").exists():
        return f"{run.name} still has its meeting place"
    if not (run / "metrics.csv").exists():
        return None  # a machine without rank 0
    with (run / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if any(None in row or None in row.values() for row in rows):
        return f"{run.name} has a torn row"
    return None if rows and rows[-1]["status"] == status["status"] else f"{run.name}: the last row does not say so"
