"""A transport over torch.distributed: gloo between processes on CPUs, NCCL between GPUs.

The two backends differ. gloo allows a receive buffer to be longer than its message, but ends the process if the buffer
is shorter. After one time-out, every later call of gloo for that pair of ranks fails. gloo's errors name a port but no
rank, so each `Pending` remembers its peer. NCCL needs equal lengths on both sides, and a single group call for messages
in both directions; so with NCCL, a message of unknown length follows a message with its length, 8 bytes of control
traffic.
"""

import collections
import contextlib
import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store
from typing_extensions import override

from collectives.transport.base import (
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

_WORDS_OF_BACKENDS = ("gloo", "Wait timeout")  # in the RuntimeErrors of gloo and of a rendezvous store in a file

_num_backends: collections.Counter[tuple[str, tuple[int, ...]]] = collections.Counter()


class ProcessGroupTransport(Transport):
    """A transport over one process group of torch.distributed, used from one thread.

    Args:
        group: the process group, which `close` destroys. Use a separate `dist.new_group()`, because two threads that
            use one gloo group corrupt sums silently. None for the default group, which is not destroyed.
        device: device of the tensors. None for the CPU (gloo) or the current GPU (NCCL).
        timeout_s: longest wait for any one message, in seconds.

    Attributes:
        group_name: name of the process group, which is unique in the job and the same on all its ranks.
    """

    @override
    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | None = None, timeout_s: float = 60.0
    ) -> None:
        group = group if group is not None else dist.group.WORLD
        if group is None:
            raise TransportError("torch.distributed is not initialised; call init_process_group first")
        # Shared with views. Key None: the group of all ranks. Other keys: the ranks of a view, whose group is for the
        # backend's own collectives. gloo frees a group's threads and sockets with the last reference to the group.
        self._groups: dict[tuple[int, ...] | None, dist.ProcessGroup] = {None: group}
        self.group_name = str(group.group_name)
        self.in_step = dist.get_backend(self._group) == "nccl"
        self.members = list(range(dist.get_world_size(self._group)))
        self.names = dist.get_process_group_ranks(self._group)
        self.rank = dist.get_rank(self._group)
        self.world_size = len(self.members)
        current = torch.device("cuda", torch.cuda.current_device()) if self.in_step else torch.device("cpu")
        self.device = current if device is None else device
        self.timeout_s = timeout_s
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.ledger = Ledger()
        self._failure_detector = failure_detector()

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self._groups, "this transport is closed"
        return self._groups[None]

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        with self.ledger.timed():
            for tensor, _ in sends:
                self.ledger.book(tensor.nbytes)
            if self.in_step:  # a single group call, whose messages all complete together
                return self._post_together(sends, receives)
            # receives first, because a gloo message without a posted buffer takes another round trip
            return [self._start(self._group.recv, *receive) for receive in receives] + [
                self._start(self._group.send, *send) for send in sends
            ]

    @override
    def send_receive(
        self, sends: Sequence[Send], receives: Sequence[tuple[int, int]]
    ) -> Callable[[], list[torch.Tensor]]:
        if self.in_step:
            lengths = [(torch.tensor([message.numel()], device=self.device), to) for message, to in sends]
            incoming = [(torch.empty(1, dtype=torch.int64, device=self.device), source) for _, source in receives]
            with self.counted_as("control"):
                wait_all(self.post(lengths, incoming))
            receives = [(int(length), source) for length, source in incoming]
        return super().send_receive(sends, receives)

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        if self.world_size == 1:
            return Pending()
        with self.ledger.timed():
            self.ledger.book(round(2 * (self.world_size - 1) / self.world_size * tensor.nbytes), from_formula=True)
            options = dist.AllreduceOptions()
            options.reduceOp = _OPS[op]
            return _Operation(self, [self._backend().allreduce([tensor], options)], [tensor], None)

    @override
    def close(self) -> None:
        """Destroy the process groups of views, and the process group itself unless it is the default group.

        A second call does nothing.
        """
        group = self._groups.get(None)
        self._groups.clear()
        if group is None:
            return
        if group == dist.group.WORLD:
            self._groups[None] = group
            return
        with contextlib.suppress(ValueError):  # already destroyed, together with all other groups
            dist.destroy_process_group(group)

    def _start(
        self, function: Callable[[list[torch.Tensor], int, int], dist.Work], tensor: torch.Tensor, peer: int
    ) -> Pending:
        # a method of the group is faster than `dist.isend` and `dist.irecv`
        try:
            work = function([tensor], self.members[peer], 0)
        except RuntimeError as error:
            raise self.timeout_error(peer, str(error)) from error
        return _Operation(self, [work], [tensor], peer)  # gloo uses the tensor until the message is done

    def _post_together(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        operations = [
            dist.P2POp(function, tensor, group=self._group, group_peer=self.members[peer])
            for function, messages in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, peer in messages
        ]
        if not operations:
            return []
        peer = (*receives, *sends)[0][1]
        return [_Operation(self, dist.batch_isend_irecv(operations), operations, peer)] * len(operations)

    def _backend(self) -> dist.ProcessGroup:
        """Return a process group of exactly this transport's ranks, for the backend's own collectives.

        The group of a view is created without torch's registry, because every rank of the job would have to call
        `dist.new_group`, and with `use_local_synchronization` ranks later disagree about the names of groups.
        """
        members = tuple(self.members)
        if members == tuple(range(self._group.size())):
            return self._group
        if members not in self._groups:
            place = (self.group_name, members)
            store = PrefixStore(f"gradwire/view/{place}/{_num_backends[place]}", _get_default_store())
            _num_backends[place] += 1
            if self.in_step:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._timeout
                backend: object = dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            else:
                backend = dist.ProcessGroupGloo(store, self.rank, self.world_size, self._timeout)
            self._groups[members] = cast(dist.ProcessGroup, backend)  # a backend has the same methods as a group
        return self._groups[members]

    @override
    def timeout_error(self, rank: int | None, reason: str = "") -> TransportError:
        """Ask the failure detector for the cause of a failed wait, and return an error that names the lost rank.

        Args:
            rank: the rank that this rank waited for; None if it waited for all ranks.
            reason: message of the backend's error.
        """
        # ping all ranks of the group, not only of this view: a peer may itself wait for a rank outside the view
        ranks = dist.get_process_group_ranks(self._group)
        peer = None if rank is None else self.names[rank]
        verdict = self._failure_detector.find_lost(self.group_name, ranks, peer)
        me = f"rank {self.names[self.rank]}"
        if verdict is None:
            awaited = "the others" if peer is None else f"rank {peer}"
            return TransportError(
                f"{me} waited in vain for {awaited} and cannot find out who is lost: "
                "the rendezvous store does not answer"
            )
        if verdict.is_cut_off:
            others = "all other ranks" if len(verdict.lost) == len(ranks) - 1 else "all ranks on other machines"
            return TransportError(f"{me} lost {others}: none of them answers any more; its own link may be down")
        lost = " and ".join(f"rank {number}" for number in verdict.lost)
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
        line, *_ = reason.split("\n")
        return TransportError(f"{me}: the backend's own collective failed though all ranks are alive: {line}")


def backend_failure(error: RuntimeError) -> TransportError | None:
    """Find out which rank is lost after the backend or the rendezvous store failed; takes some seconds.

    Args:
        error: an error that DDP or `torch.distributed` raised for the default process group.

    Returns:
        The error to raise, which names the lost rank; None if `error` did not come from the backend or the store.
    """
    if not isinstance(error, dist.DistError) and not any(words in str(error) for words in _WORDS_OF_BACKENDS):
        return None
    return ProcessGroupTransport().timeout_error(None, str(error))


@dataclasses.dataclass(eq=False)
class _Operation(Pending):
    """An operation of the backend: one message, all messages of one NCCL group call, or an all-reduce.

    Attributes:
        transport: the transport that started the operation.
        works: the backend's handles of the operation; empty once the operation is done.
        kept: objects that must stay alive until the operation is done, such as its tensors.
        peer: the rank for which this rank waits; None if it waits for all ranks.
    """

    transport: ProcessGroupTransport
    works: list[dist.Work]
    kept: Sequence[object]
    peer: int | None

    @override
    def wait(self) -> None:
        if not self.works:
            return
        with self.transport.ledger.timed():
            try:
                for work in self.works:
                    work.wait(self.transport._timeout)
            except RuntimeError as error:
                raise self.transport.timeout_error(self.peer, str(error)) from error
        self.works = []


def gather_json(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Send this rank's JSON value to all ranks of the group, and return the values of all ranks in rank order.

    Every rank of the group must call this function.

    Args:
        own: this rank's value.
        group: the process group; None for all ranks.
    """
    return [json.loads(text) for text in gather_bytes(json.dumps(own).encode(), group)]


def gather_bytes(own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Send this rank's bytes, of any length, to all ranks of the group; return the bytes of all ranks in rank order.

    Every rank of the group must call this function.

    Args:
        own: this rank's bytes.
        group: the process group; None for all ranks.
    """
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    length = torch.tensor([len(own)], device=device)
    lengths = [torch.empty_like(length) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, length, group=group)
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8, device=device)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [bytes(raw[: int(size)].cpu().numpy()) for raw, size in zip(everyone, lengths, strict=True)]
