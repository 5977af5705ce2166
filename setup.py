"""Builds the native loops and the forwarder along with the package; everything else stands in pyproject.toml.

Where they cannot be compiled the installation goes on without them: `bench doctor` says why.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

sys.path.insert(0, str(Path(__file__).parent))
from bench.hosts import forwarder
from collectives.kernels import build as loops


class BuildLoops(Command):
    """Compiles into the build folder, or for an editable installation beside the loader."""

    user_options: ClassVar[list[str]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        if reason := loops.build_or_say_why(self._folder(loops.HERE)):
            self.warn(f"no native loops, the reference path will serve: {reason}")
        if reason := loops.build_or_say_why(self._folder(forwarder.HERE), forwarder.build):
            self.warn(f"no forwarder, links of virtual hosts will be what the kernel makes of them: {reason}")

    def _folder(self, beside: Path) -> Path:
        if self.editable_mode:
            return beside
        assert self.build_lib is not None
        return Path(self.build_lib, beside.relative_to(loops.ROOT))

    def get_source_files(self) -> list[str]:
        return [str(path.relative_to(loops.ROOT)) for path in (*loops.sources(), *forwarder.sources())]

    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class PlatformWheel(bdist_wheel):
    """The libraries fit one kind of machine, every version of Python, and every C library from `loops.GLIBC` on."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        if list(Path(self.get_finalized_command("build").build_lib).rglob("*.so")):
            platform = platform.replace("linux_", f"manylinux_{loops.GLIBC.replace('.', '_')}_")
        return "py3", "none", platform


class PlatformDistribution(Distribution):
    """Goes where packages with libraries go."""

    def has_ext_modules(self) -> bool:
        return True


build.sub_commands.append(("build_loops", None))
setup(distclass=PlatformDistribution, cmdclass={"build_loops": BuildLoops, "bdist_wheel": PlatformWheel})
