"""The transport over torch.distributed: gloo between processes on CPUs, NCCL between GPUs.

The two backends differ. gloo lets a receive buffer be longer than its message but ends the process if it is shorter;
after one time-out every later call on that pair of ranks fails; its errors name a port and never a rank, so each
`Pending` remembers its peer. NCCL needs equal lengths on both sides and one group call for messages in both
directions, so there a message of unknown length is preceded by its length, as 8 bytes of control traffic.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import datetime
from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from typing_extensions import override

from collectives.transport.base import (
    Done,
    Incoming,
    Ledger,
    Pending,
    Receive,
    ReduceOp,
    Send,
    Transport,
    TransportError,
    wait_all,
)
from collectives.transport.failure_detector import failure_detector

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

_TAG = 0
_WORDS_OF_BACKENDS = ("gloo", "Wait timeout")  # in plain RuntimeErrors of gloo and of a rendezvous store in a file

_num_backends: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()


@dataclasses.dataclass(eq=False)
class _Groups:
    """Process groups that a transport shares with its views; gloo frees threads and sockets with the last reference.

    Attributes:
        whole: the group of all ranks; None once the transport is closed.
        parts: groups of some ranks, by their numbers in `whole`, for the backend's own collectives.
    """

    whole: dist.ProcessGroup | None
    parts: dict[tuple[int, ...], dist.ProcessGroup] = dataclasses.field(default_factory=dict)


class ProcessGroupTransport(Transport):
    """Messages over one process group, used from one thread.

    Args:
        group: the process group, which `close` destroys; use a separate `dist.new_group()`, because two threads on one
            gloo group corrupt sums silently. None: the default group, which is not destroyed.
        device: device of the tensors; None: the CPU for gloo, the current GPU for NCCL.
        timeout_s: longest wait for any one message, in seconds.
    """

    @override
    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None, timeout_s: float = 60.0
    ) -> None:
        self._groups = _Groups(group if group is not None else _world())
        self.in_step = dist.get_backend(self._group) == "nccl"
        self._members = list(range(dist.get_world_size(self._group)))
        self.rank = dist.get_rank(self._group)
        self.world_size = len(self._members)
        self.device = device if device is not None else _default_device(self.in_step)
        self.timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.ledger = Ledger()
        self._failure_detector = failure_detector()

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._groups.whole is not None, "this transport is closed"
        return self._groups.whole

    @property
    def group_name(self) -> str:
        """Return the name of the process group, unique in the job and equal on its ranks."""
        return str(self._group.group_name)

    @override
    def name(self, rank: int) -> int:
        return dist.get_global_rank(self._group, self._members[rank])

    @override
    def timeout_error(self, rank: int) -> TransportError:
        """Find out which rank is lost by pinging all ranks, which takes some seconds."""
        return self._lost(rank, "")

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        """Start the messages; on NCCL those of one `post` are one group call and complete together."""
        with self.ledger.timed():
            for tensor, _ in sends:
                self.ledger.book(tensor.numel() * tensor.element_size())
            if self.in_step:
                return self._post_together(sends, receives)
            # receives first: a gloo message without a posted buffer takes another round trip
            return [self._start(self._group.recv, *receive) for receive in receives] + [
                self._start(self._group.send, *send) for send in sends
            ]

    @override
    def send_receive(self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]) -> Incoming:
        """Start the messages; on NCCL, exchange their lengths first."""
        if not self.in_step:
            return super().send_receive(sends, receives)
        lengths = [torch.tensor([message.numel()], device=self.device) for message, _ in sends]
        incoming = [torch.empty(1, dtype=torch.int64, device=self.device) for _ in receives]
        with self.counted_as("control"):
            wait_all(
                self.post(
                    [(length, to) for length, (_, to) in zip(lengths, sends, strict=True)],
                    [(length, source) for length, (_, source) in zip(incoming, receives, strict=True)],
                )
            )
        buffers = [torch.empty(int(length), dtype=torch.uint8, device=self.device) for length in incoming]
        incoming_messages = [(buffer, source) for buffer, (_, source) in zip(buffers, receives, strict=True)]
        return Incoming(buffers, self.post(sends, incoming_messages))

    @override
    def all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> None:
        self.start_all_reduce_(tensor, op).wait()

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        if self.world_size == 1:
            return Done()
        with self.ledger.timed():
            nbytes = tensor.numel() * tensor.element_size()
            self.ledger.book(round(2 * (self.world_size - 1) / self.world_size * nbytes), from_formula=True)
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            return _AllReduce(self, self._backend().allreduce([tensor], options))

    @override
    def view(self, ranks: Sequence[int]) -> ProcessGroupTransport:
        """Return a view; its process group for the backend's own collectives is created when first used."""
        part = copy.copy(self)
        part._members = [self._members[rank] for rank in ranks]
        part.rank = list(ranks).index(self.rank)
        part.world_size = len(part._members)
        return part

    @override
    def close(self) -> None:
        """Destroy the process group, unless it is the default one, and those of views; a second call does nothing."""
        group = self._groups.whole
        self._groups.parts.clear()
        if group is None or group == dist.group.WORLD:
            return
        self._groups.whole = None
        with contextlib.suppress(ValueError):  # already destroyed, together with all others
            dist.destroy_process_group(group)

    def _start(
        self, function: Callable[[list[torch.Tensor], int, int], dist.Work], tensor: torch.Tensor, peer: int
    ) -> Pending:
        """Call a method of the group directly, which is faster than `dist.isend` and `dist.irecv`."""
        try:
            work = function([tensor], self._members[peer], _TAG)
        except RuntimeError as error:
            raise self._lost(peer, str(error)) from error
        return _Message(self, work, tensor, peer)

    def _post_together(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        def operation(function: object, tensor: torch.Tensor, peer: int) -> dist.P2POp:
            return dist.P2POp(function, tensor, group=self._group, group_peer=self._members[peer])  # type: ignore[arg-type]

        operations = [operation(dist.irecv, *receive) for receive in receives]
        operations += [operation(dist.isend, *send) for send in sends]
        if not operations:
            return []
        peers = [peer for _, peer in (*receives, *sends)]
        together = _Together(self, dist.batch_isend_irecv(operations), operations, peers)
        return [together] * len(operations)

    def _backend(self) -> dist.ProcessGroup:
        """Return the process group of exactly these ranks, for the backend's own collectives.

        A view creates one without torch's registry: `dist.new_group` must be called by every rank of the job, and with
        `use_local_synchronization` ranks later disagree about the names of groups.
        """
        members = tuple(self._members)
        if members == tuple(range(self._group.size())):
            return self._group
        if members not in self._groups.parts:
            place = (self._group.group_name, members)
            store = PrefixStore(f"gradwire/view/{place}/{_num_backends[place]}", _get_default_store())
            _num_backends[place] += 1
            if self.in_step:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                backend: object = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            else:
                backend = dist.ProcessGroupGloo(store, self.rank, self.world_size, self._timeout)
            self._groups.parts[members] = cast(dist.ProcessGroup, backend)  # it has the same methods
        return self._groups.parts[members]

    def _wait_for_all(self, work: dist.Work) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._lost(None, str(error)) from error

    def _lost(self, waited_for: int | None, reason: str) -> TransportError:
        """Ask the failure detector, and return an error that names the lost rank; `waited_for` None: all ranks."""
        # all ranks of the group, not only of this view: a peer here may be waiting for a rank outside of the view
        ranks = [dist.get_global_rank(self._group, member) for member in range(dist.get_world_size(self._group))]
        peer = None if waited_for is None else self.name(waited_for)
        verdict = self._failure_detector.find_lost(self._group.group_name, ranks, peer)
        me = f"rank {self.name(self.rank)}"
        if verdict is None:
            awaited = "the others" if peer is None else f"rank {peer}"
            return TransportError(
                f"{me} waited in vain for {awaited} and cannot find out who is lost: "
                "the rendezvous store does not answer"
            )
        if verdict.is_cut_off:
            others = "all other ranks" if len(verdict.lost) == len(ranks) - 1 else "all ranks on other machines"
            return TransportError(f"{me} lost {others}: none of them answers any more; its own link may be down")
        lost = " and ".join(f"rank {rank}" for rank in verdict.lost)
        if verdict.is_split:
            return TransportError(f"{me} and {lost} cannot reach each other; the link of either may be down")
        if verdict.lost:
            verb = "does" if len(verdict.lost) == 1 else "do"
            return TransportError(f"{me} lost {lost}, which {verb} not answer any more", lost_rank=verdict.lost[0])
        if verdict.late is not None:
            return TransportError(
                f"{me} waited {self.timeout_s:g} s for rank {verdict.late}, which is alive but did not take part; "
                "a slow rank needs a longer timeout",
                lost_rank=verdict.late,
            )
        first_line = reason.partition("\n")[0]
        return TransportError(f"{me}: the backend's own collective failed though all ranks are alive: {first_line}")


def backend_failure(error: RuntimeError) -> TransportError | None:
    """Find out which rank was lost when the backend or the rendezvous store failed; takes some seconds.

    Args:
        error: an error that DDP or `torch.distributed` raised on the default group.

    Returns:
        An error that names the lost rank; None if `error` did not come from the backend or the store.
    """
    if not isinstance(error, dist.DistError) and not any(words in str(error) for words in _WORDS_OF_BACKENDS):
        return None
    return ProcessGroupTransport()._lost(None, str(error))


class _AllReduce(Pending):
    """An all-reduce of the backend that is under way."""

    def __init__(self, transport: ProcessGroupTransport, work: dist.Work) -> None:
        self._transport = transport
        self._work = work

    def wait(self) -> None:
        with self._transport.ledger.timed():
            self._transport._wait_for_all(self._work)


class _Message(Pending):
    """One gloo message; keeps its tensor alive, because gloo reads or writes it until the message is done."""

    def __init__(self, transport: ProcessGroupTransport, work: dist.Work, tensor: torch.Tensor, peer: int) -> None:
        self._work: dist.Work | None = work
        self._transport = transport
        self._tensor = tensor
        self._peer = peer

    def wait(self) -> None:
        if self._work is None:
            return
        with self._transport.ledger.timed():
            try:
                self._work.wait(self._transport._timeout)
            except RuntimeError as error:
                raise self._transport._lost(self._peer, str(error)) from error
        self._work = None


class _Together(Pending):
    """Messages of one NCCL group call."""

    def __init__(
        self, transport: ProcessGroupTransport, works: list[dist.Work], operations: list[dist.P2POp], peers: list[int]
    ) -> None:
        self._works = works
        self._transport = transport
        self._operations = operations
        self._peers = peers

    def wait(self) -> None:
        with self._transport.ledger.timed():
            try:
                for work in self._works:
                    work.wait(self._transport._timeout)
            except RuntimeError as error:
                raise self._transport._lost(self._peers[0], str(error)) from error
        self._works = []


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    if group is None:
        raise TransportError("torch.distributed is not initialised; call init_process_group first")
    return group


def _default_device(on_gpu: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
