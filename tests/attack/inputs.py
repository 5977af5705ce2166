"""Random command lines and files for every command, from a grammar.

Commands and options are read from Typer, so new ones are attacked without a change here. A case fails if it ends in a
traceback, hangs, or ends with an exit code that the README does not list for its command. Cases run in forks of a
process that has imported everything; every fiftieth runs in a new process.
"""

from __future__ import annotations

import dataclasses
import io
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cli.app import main
from bench.core import registry
from tests.attack.tally import Tally
from tests.testing.fake_rows import fake_seeds, topk_seeds
from tests.testing.invoke import REPOSITORY, commands

HANG_S = 20.0
REAL_PROCESS_EVERY = 50
CODES = {
    "run": {0, 2},  # always with --dry-run
    "list": {0, 2},
    "compare": {0, 2, 4, 5},
    "data": {0, 2, 3},
    "doctor": {0, 2, 3},
    "collectives": {0, 2, 3},
    "compressors": {0, 2, 3},
}
OUTPUT_FAILED = 3
# With these options, a command that is accepted ends soon, and downloads nothing.
ALWAYS = {
    "run": ["--dry-run"],
    "doctor": ["--no-smoke"],
    "collectives": ["--sizes", "1kB", "--iters", "1", "--rounds", "1", "--warmup", "0", "--collectives", "native"],
    "compressors": ["--model", "linear", "--repeats", "1", "--compressors", "none"],
}
NUMBERS = [
    "inf", "-inf", "nan", "1e999", "-1", "0", "-0", "1", "2", "3", "0.5", "1e30", "9" * 30, "9" * 5000,
    "-" + "9" * 5000, "", " ", "²", "٣", "1e", "0x10", "1_000", "1,000", "1.5.2", "--", "4294967296",
    "18446744073709551616", "1000000001",
]  # fmt: skip
TEXTS = [
    "", " ", "-", ":", ",", "=", "x", "none", "x" * 300, "x" * 70000, "ä²漢", "\udcff", "a\nb", "[red]", "[/]", "%s{}",
    "../..", "/", "\\", "'", '"', "topk", "topk:ratio", "topk:ratio=", "topk:ratio=2", "topk:ratio=0.1,ratio=0.2",
    "topk:=1", "topk:ratio=inf", "topk:skip=norm+nothing", "linear:base=0", "rank=1,slowdown=0", "1e99gbit", "0mbit",
    "99999gbit", "1e99h", "-5ms", "200%", "nan%", "localhost:²²", "[::1", "host:0", "1B:1e30GB", "GB", "1-99999999999",
    "5-1", "1,1", "slower:5%", "slower:999%", "accuracy:-1", "adsl", "cifar10:url=http://127.0.0.1:9/x",
    "cifar10:url=http://[::1/x", "synthetic:train_size=0", "small_cnn:width=999999", "sgd:momentum=1", "server:root=99",
]  # fmt: skip
FILES = [
    "good.csv", "folder", "pipe", "loop", "missing", "x" * 300, "/dev/zero", "/dev/full", "/dev/null", "empty", "noise",
    "good.toml", "good.csv/inside", "*", "[", "**/*.csv", "folder/..", "\udcff",
]  # fmt: skip
CELLS = ["inf", "-inf", "nan", "1e300", "9" * 400, "-1", "", "x", '"', "ä", "\0", "true", "x" * 200_000, "1e-320"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One command line, the contents of its files, and the kind of its output."""

    command: str
    arguments: list[str]
    files: dict[str, bytes]
    output: str
    encoding: str

    @property
    def codes(self) -> set[int]:
        """The exit codes that the README allows."""
        return CODES[self.command] | ({OUTPUT_FAILED} if self.output != "file" else set())

    def __str__(self) -> str:
        words = ascii(shlex.join(self.arguments))
        return f"bench {words if len(words) < 500 else words[:500] + '...'} (to {self.output}, {self.encoding})"


class Grammar:
    """A generator of cases; equal seeds generate equal cases."""

    def __init__(self, rng: random.Random, folder: Path) -> None:
        self._random = rng
        self._commands = commands()
        self._names = [name for kind in registry.KINDS for name in registry.entries(kind) if "cifar" not in name]
        self._table = _good_csv(folder)

    def case(self) -> Case:
        """Return the next case."""
        choose = self._random
        command = choose.choice([*CODES, "compare", "run"])
        words = [*ALWAYS.get(command, [])]
        parameters = [p for p in self._commands[command].params if p.name not in ("help", "smoke", "dry_run")]
        for parameter in choose.sample(parameters, min(len(parameters), choose.choice([0, 1, 1, 2, 3]))):
            words += self._words_for(command, parameter)
        if choose.random() < 0.1:
            stray = choose.choice(["--", "--nothing", "-x", "--help", *TEXTS[:20]])
            words.insert(choose.randrange(len(words) + 1), stray)
        if command == "compare" and choose.random() < 0.6:
            words.append(choose.choice(["mutant.csv", *FILES]))
        return Case(
            command,
            [command, *words],
            {"mutant.csv": self._mutant_table(), "mutant.toml": self._mutant_cluster()},
            choose.choice(["file"] * 8 + ["/dev/full", "broken pipe"]),
            choose.choice(["utf-8"] * 4 + ["ascii", "cp1252"]),
        )

    def _words_for(self, command: str, parameter: Any) -> list[str]:
        choose = self._random
        names = [name for name in parameter.opts if name.startswith("-")]
        if command == "data" and not names:
            value = choose.choice(["list", "verify", "prepare", "digits", *self._names[:3], *TEXTS])
            return [value]
        if names and getattr(parameter, "is_flag", False):
            return [choose.choice([*names, *parameter.secondary_opts])]
        pools: list[Callable[[], str]] = [
            lambda: choose.choice(NUMBERS),
            lambda: choose.choice(TEXTS),
            lambda: choose.choice(FILES),
            lambda: choose.choice(self._names),
            lambda: f"{choose.choice(self._names)}:{choose.choice(TEXTS)}={choose.choice(NUMBERS)}",
        ]
        if parameter.name in ("cluster_file", "paths"):
            pools = [lambda: choose.choice(["mutant.toml", "mutant.csv", *FILES])]
        value = choose.choice(pools)()
        return [choose.choice(names), value] if names else [value]

    def _mutant_table(self) -> bytes:
        choose = self._random
        lines = [line.split(b",") for line in self._table.splitlines()]
        for _ in range(choose.choice([1, 1, 3, 30])):
            row = choose.choice(lines)
            row[choose.randrange(len(row))] = choose.choice(CELLS).encode()
        return self._damaged(b"\n".join(map(b",".join, lines)) + b"\n")

    def _mutant_cluster(self) -> bytes:
        choose = self._random
        keys = ["name", "count", "network", "bandwidth", "uplink", "latency", "jitter", "loss", "cpu_share", "x y", ""]
        values = [
            "3",
            "-1",
            "9" * choose.choice([12, 5000]),
            "inf",
            "nan",
            "true",
            "[]",
            "{}",
            "1979-05-27",
            '"100mbit"',
        ]
        values += ["[" * 5000, '"1e99gbit"', '"5ms"', '"wifi"', '"1%"', "0.5", '"x"', '""', '"""']
        lines = [f"ranks_per_host = {choose.choice(values)}"] if choose.random() < 0.3 else []
        for _ in range(choose.choice([0, 1, 2, 3, 300])):
            lines += ["[[host]]", *(f"{choose.choice(keys)} = {choose.choice(values)}" for _ in range(2))]
        return self._damaged("\n".join(lines).encode())

    def _damaged(self, content: bytes) -> bytes:
        """Return the content, which in half of all cases is cut and has random bytes changed."""
        choose = self._random
        if choose.random() < 0.5 or not content:
            return content
        damaged = bytearray(content[: choose.randrange(len(content)) + 1])
        for _ in range(choose.choice([0, 1, 100])):
            damaged[choose.randrange(len(damaged))] = choose.randrange(256)
        return choose.choice([b"", b"\xef\xbb\xbf", b"\xff\xfe"]) + bytes(damaged)


def _good_csv(folder: Path) -> bytes:
    from bench.core.rows import RowWriter

    RowWriter(folder / "good.csv").extend(fake_seeds([1000, 1100, 1200]) + topk_seeds([2000, 2100, 2200]))
    return (folder / "good.csv").read_bytes()


def lay_out(folder: Path) -> None:
    """Create the files and folders that `FILES` names."""
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "noise").write_bytes(random.Random(0).randbytes(10_000))
    (folder / "good.toml").write_text("[[host]]\ncount = 2\nbandwidth = '100mbit'\n", encoding="utf-8")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


def run(case: Case, folder: Path, *, in_own_process: bool) -> tuple[int | None, str | None]:
    """Run a case; return its exit code and a description of what is wrong with its ending."""
    for name, content in case.files.items():
        (folder / name).write_bytes(content)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        if in_own_process:
            code = _own_process(case, folder, out, error)
        else:
            code = _forked(case, folder, out, error)
        error.seek(0)
        said = error.read().decode(errors="replace")
    if code is None:
        return code, f"hangs for {HANG_S:g} s"
    if "Traceback" in said:
        return code, f"ends in a traceback: {said[-3000:]}"
    if code not in case.codes:
        return code, f"ends with {code}, which is none of {sorted(case.codes)}: {said[-500:]}"
    return code, None


def _forked(case: Case, folder: Path, out: Any, error: Any) -> int | None:
    pid = os.fork()
    if pid == 0:
        _become(case, folder, out, error)
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _become(case: Case, folder: Path, out: Any, error: Any) -> None:
    """Turn this fork into the command; never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.dup2(_output(case, out.fileno()), 1)
        os.dup2(error.fileno(), 2)
        sys.stdout = io.TextIOWrapper(open(1, "wb", closefd=False), encoding=case.encoding)  # noqa: SIM115
        sys.stderr = io.TextIOWrapper(
            open(2, "wb", closefd=False), encoding=case.encoding, errors="backslashreplace", write_through=True  # noqa: SIM115
        )  # fmt: skip
        sys.argv = ["bench", *case.arguments]
        main()
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _own_process(case: Case, folder: Path, out: Any, error: Any) -> int | None:
    try:
        return subprocess.run(
            [sys.executable, "-P", "-m", "bench", *case.arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": case.encoding},
            stdout=_output(case, out.fileno()),
            stderr=error,
            timeout=HANG_S,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return None


def _output(case: Case, file: int) -> int:
    if case.output == "broken pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return writer
    return file if case.output == "file" else os.open(case.output, os.O_WRONLY)


def attack(rng: random.Random, tally: Tally, tries: int) -> None:
    """Run cases one after another.

    Args:
        rng: source of the cases.
        tally: gets one count per case.
        tries: number of cases.
    """
    for kind in registry.KINDS:
        registry.ask_each(kind, lambda component: component)  # the modules that every case would import
    with tempfile.TemporaryDirectory(prefix="bench-attack-") as name:
        folder = Path(name)
        lay_out(folder)
        grammar = Grammar(rng, folder)
        for number in range(tries):
            if not tally.has_time():
                return
            case = grammar.case()
            code, problem = run(case, folder, in_own_process=number % REAL_PROCESS_EVERY == REAL_PROCESS_EVERY - 1)
            tally.count(f"{case.command} exit {code}", problem and f"case {number}: {case} {problem}")
