"""A third-party package in which every component is broken in a different way, installed by its entry points alone."""

from __future__ import annotations

from pathlib import Path

from tests.testing.plugins import install_entry_points

MODULES = {
    "broken_import": "import nonexistent_module",
    "broken_syntax": "def (",
    "broken_exit": "import sys; sys.exit(7)",
    "broken_base": "raise BaseException('a\\nb')",
    "broken": """
import dataclasses

from bench.datasets.built_in import Digits
from collectives.options import OptionError
from compressors.base import Compressor
from compressors.floats import Fp16

number = 3


class Stranger: ...


@dataclasses.dataclass(kw_only=True)
class Abstract(Compressor): ...


class Undecorated(Fp16):
    def __init__(self, ratio): ...


@dataclasses.dataclass(kw_only=True)
class Raising(Fp16):
    def __post_init__(self):
        raise RuntimeError("no licence")


@dataclasses.dataclass(kw_only=True)
class Refusing(Fp16):
    def __post_init__(self):
        raise OptionError("never right")


@dataclasses.dataclass(kw_only=True)
class Clash(Fp16): ...


@dataclasses.dataclass(kw_only=True)
class Sizeless(Digits):
    def sizes(self):
        raise RuntimeError("no sizes")
""",
}
REASONS = {
    "b_import": ("broken_import:X", "ModuleNotFoundError: No module named 'nonexistent_module'"),
    "b_syntax": ("broken_syntax:X", "SyntaxError: invalid syntax"),
    "b_exit": ("broken_exit:X", "SystemExit: 7"),
    "b_base": ("broken_base:X", "BaseException: a b"),
    "b_number": ("broken:number", "does not derive from compressors.base.Compressor"),
    "b_stranger": ("broken:Stranger", "does not derive from compressors.base.Compressor"),
    "b_abstract": ("broken:Abstract", "does not define expected_nbytes"),
    "b_undecorated": ("broken:Undecorated", "is not decorated with @dataclasses.dataclass"),
    "b_absent": ("broken:Absent", "has no attribute 'Absent'"),
    "b_module": ("broken", "has no attribute ''"),
    "b_raising": ("broken:Raising", "RuntimeError: no licence"),
}
"""compressor -> (entry point of its class, the reason why it cannot be used)"""
CLASH = "fp16"


def install(folder: Path) -> None:
    """Write the package to `folder`, which must be on the import path."""
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source, encoding="utf-8")
    compressors = {name: target for name, (target, _) in REASONS.items()}
    points = {
        "bench.compressors": compressors | {"b_refusing": "broken:Refusing", CLASH: "broken:Clash"},
        "bench.collectives": {"c_import": "broken_import:X", "c_abstract": "broken:Abstract"},
        "bench.strategies": {"s_exit": "broken_exit:X"},
        "bench.optimizers": {"o_exit": "broken_exit:X"},
        "bench.models": {"m_exit": "broken_exit:X"},
        "bench.datasets": {"d_import": "broken_import:X", "d_sizeless": "broken:Sizeless"},
    }
    install_entry_points(folder, "broken", points)
