"""Native: the backend's own all-reduce of the dense tensor, as DDP uses it by default; the baseline.

The backend determines the order of additions and the rounding: 16-bit sums are rounded at every hop.

Bytes: 2 (n-1)/n of the wire tensor per rank, by the formula of a ring, because the backend does not report its bytes.
"""

import dataclasses

import torch
from typing_extensions import override

from collectives.base import AnswerEncoder, BoundCollective, Collective, PendingSum
from collectives.options import Incompatible
from collectives.payloads.base import Payload, PayloadError
from collectives.schedule.layout import Layout
from collectives.transport.base import Pending, ReduceOp, Transport


@dataclasses.dataclass(kw_only=True)
class Native(Collective):
    """Sum with the all-reduce of the torch.distributed backend."""

    @override
    def bind(self, transport: Transport, downlink: AnswerEncoder | None = None) -> BoundCollective:
        return BoundNative(self, transport)

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        if not kind.elementwise:
            raise Incompatible(
                f"native adds tensors element by element, which {kind.__name__} payloads do not allow; "
                + ("ring adds them by merging, " if kind.addable else "")
                + "allgather takes every kind"
            )

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return None, because the backend does not show its messages."""

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return 2 * (world_size - 1) / world_size * nbytes


class BoundNative(BoundCollective):
    """The collective `native` among the ranks of a transport."""

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        wire = payload.wire
        if wire.dtype == torch.int16:
            raise PayloadError("native cannot add 16-bit integers; use 8- or 32-bit ones, or collective ring")
        pending = self.transport.start_all_reduce_(wire, op) if wire.numel() else Pending()

        def finish() -> Payload:
            pending.wait()
            if wire.dtype in (torch.float16, torch.bfloat16):
                limit = torch.finfo(wire.dtype).max
                wire.clamp_(-limit, limit)  # the backend overflows, while other collectives saturate
            return payload.with_wire(wire)

        return PendingSum(wait=pending.wait, finish=finish)
