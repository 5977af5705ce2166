"""One exchange on one rank, and the names under which libraries record its kind, its type and its size."""

from __future__ import annotations

import dataclasses
import math

_KINDS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
BETWEEN_TWO = frozenset({"send", "recv", "send_recv"})
_MOST_NUMEL = 1 << 50
_ITEMSIZES = {
    **dict.fromkeys(("float", "int", "float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "half", "short", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("double", "long", "float64", "int64", "uint64", "complexfloat"), 8),
    **dict.fromkeys(("byte", "char", "bool", "int8", "uint8"), 1),
}
_C_NAMES = {"longint": "long", "shortint": "short", "unsignedchar": "byte", "signedchar": "char"}


@dataclasses.dataclass(kw_only=True)
class Call:
    """One exchange on one rank.

    Attributes:
        kind: "all_reduce" and so on; "gradwire" for an exchange of this project; "unknown".
        group: the library, the name of the process group, and its ranks in ascending order (empty if not recorded).
        start_s, end_s: when it began and ended, in seconds after the beginning of the first step.
        in_numel: number of elements that this rank contributes; None if not recorded.
        out_numel: number of elements that this rank gets; None if not recorded.
        dtype: type of the elements, such as "bfloat16"; "" if not recorded.
        sequence: number of the exchange in its group; None if not recorded.
    """

    kind: str
    group: tuple[str, str, tuple[int, ...]]
    start_s: float
    end_s: float
    in_numel: int | None = None
    out_numel: int | None = None
    dtype: str = ""
    sequence: int | None = None

    @property
    def itemsize(self) -> int | None:
        """Return the bytes of an element; None if not known."""
        return 1 if self.dtype.startswith("float8") else _ITEMSIZES.get(self.dtype)


def kind_of(name: str) -> str:
    """Return the kind of an exchange: "_allgather_base" or "ncclDevKernel_AllGather_RING_LL" -> "all_gather"."""
    letters = name.partition("(")[0].lower().replace("_", "")
    return next((kind for part, kind in _KINDS.items() if part in letters), "unknown")


def dtype_of(value: object) -> str:
    """Return the short name of a type: "c10::BFloat16" -> "bfloat16", "long int" -> "long"."""
    name = str(value).rpartition("::")[2].replace(" ", "").lower()[:20]
    return _C_NAMES.get(name, name)


def numel_of(shape: object, depth: int = 4) -> int | None:
    """Return the number of elements of a shape, or of all shapes in a list of these, nested at most `depth` times."""
    if not isinstance(shape, list) or not depth:
        return None
    if all(isinstance(length, int) and 0 <= length < _MOST_NUMEL for length in shape):
        return min(math.prod(shape[:8]), _MOST_NUMEL) if shape else None
    known = [numel for part in shape if (numel := numel_of(part, depth - 1)) is not None]
    return sum(known) if known else None
