"""Run the native loops' tests under the system compiler's sanitizers: `python -m tests.sanitize [CASES]`.

The sources are compiled with `cc` (gcc or clang) so that they stop at an access outside any tensor and at undefined
behaviour; then the tests that compare them with the reference path run with that library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from collectives.kernels.build import ROOT, digest, library_name, sources
from collectives.kernels.library import suitable_processors

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g", "-O1")
CASES = 300


def compile_into(folder: Path) -> None:
    """Compile every C file into the library that the loader will look for."""
    files = sources()
    command = [
        "cc",
        "-std=c11",
        *SANITIZERS,
        "-ffp-contract=off",
        "-fno-strict-aliasing",
        "-shared",
        "-fPIC",
        f'-DSOURCES="{digest(files)}"',
    ]
    command += ["-o", str(folder / library_name(suitable_processors()[-1]))]
    subprocess.run([*command, *(str(path) for path in files if path.suffix == ".c")], check=True)


def preloaded() -> str:
    """Return the libraries to preload: the sanitizer, and the library whose exceptions it watches."""
    names = ("libasan.so", "libstdc++.so.6")
    found = [
        subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True) for name in names
    ]
    return " ".join(done.stdout.strip() for done in found)


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        compile_into(Path(folder))
        tests = [sys.executable, "-m", "pytest", "-qs", "-p", "no:cacheprovider", "-m", "loops", "--timeout", "0"]
        tests += [
            "--loops",
            folder,
            "--cases",
            arguments[0] if arguments else str(CASES),
            "tests/unit/compressors",
            "tests/unit/collectives",
        ]
        options = {"LD_PRELOAD": preloaded(), "ASAN_OPTIONS": "detect_leaks=0"}
        return subprocess.run(tests, cwd=ROOT, env=os.environ | options, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
