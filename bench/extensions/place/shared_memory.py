"""A transport through memory that all ranks map: processes on one machine, or hosts that share a CXL memory pool.

Each ordered pair of ranks has a channel, which is a ring buffer of bytes. There are no locks, no threads, and no atomic
operations except aligned stores. A rank moves its messages only while it posts or waits. A wait for one message moves
all messages that are under way, so ranks that send each other long messages in a circle do not deadlock. Bytes that fit
into the ring are sent at once; the rest of a longer message is sent when its sender waits.
"""

import collections
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from collectives.payloads.base import balanced_borders
from collectives.transport.base import (
    Ledger,
    MovedMessage,
    Pending,
    Receive,
    ReduceOp,
    Send,
    Transport,
    TransportError,
    wait_all,
)
from collectives.transport.mapped_memory import PAGE, SharedMemory, SpinThenSleep, map_together
from collectives.transport.memory_region import rounded_up
from collectives.transport.messages import sum_wires

WORD = 8
PARTS_PER_RING = 4  # the receiver reads one part while the sender writes the next ones


class RingMessage(MovedMessage):
    """A tensor that is copied into a channel's ring buffer or out of it, in several pieces."""

    def __init__(self, peer: int, wait: Callable[[MovedMessage, int], None], tensor: torch.Tensor) -> None:
        super().__init__(peer, wait)
        self.raw = tensor.detach().view(-1).view(torch.uint8).numpy()
        self.nbytes = len(self.raw)
        self.position = -WORD  # negative until the message's length has been transferred


class ChannelEnd:
    """One rank's end of a channel, which carries messages from one rank to another through a ring buffer.

    The sender's end copies messages into the ring buffer, and the receiver's end copies them out of it.

    Args:
        memory: the shared memory with the ring buffer, and with lines (128 bytes each) in which ranks announce
            progress.
        ring: the ring buffer, uint8, a part of the memory's data; its length is a multiple of `WORD`.
        lines: numbers of the lines in which this end and the other end announce their progress.
        peer: number of the other rank, for error messages.
        sends: True for the sender's end, False for the receiver's.

    Attributes:
        messages: the messages under way, in order.
    """

    def __init__(
        self, memory: SharedMemory, ring: torch.Tensor, lines: tuple[int, int], peer: int, *, sends: bool
    ) -> None:
        self._memory = memory
        self._address = ring.data_ptr()
        self._bytes = ring.numpy()
        self._words: np.ndarray[Any, np.dtype[np.uint64]] = self._bytes.view(np.uint64)
        self._part_bytes = max(WORD, len(self._bytes) // PARTS_PER_RING // WORD * WORD)
        self._own_line, self._peer_line = lines
        self._peer = peer
        self._sends = sends
        self._passed = 0  # bytes that this end has transferred since the start
        self.messages: collections.deque[RingMessage] = collections.deque()

    def advance(self) -> bool:
        """Copy the bytes that can be copied into or out of the ring buffer now; return True if there were any.

        Raises:
            TransportError: a message is longer than its receive buffer.
        """
        before = self._passed
        while self.messages:
            # bytes transferred by the other end minus bytes transferred by this end; a sender gets 0 or less
            ahead = self._memory.announced(self._peer_line, 0) - self._passed
            available = len(self._bytes) + ahead if self._sends else ahead
            if not available:
                break
            message = self.messages[0]
            if message.position < 0:
                self._pass_length(message, self._passed % len(self._bytes) // WORD)
                message.position = 0
                available -= WORD
                self._passed += WORD
            start = self._passed % len(self._bytes)
            nbytes = min(message.nbytes - message.position, available, self._part_bytes, len(self._bytes) - start)
            if nbytes:
                ring, ours = self._bytes[start : start + nbytes], message.raw[message.position :][:nbytes]
                if self._sends:
                    ring[:] = ours
                self._memory.synchronize_at(self._address + start, nbytes)
                if not self._sends:
                    ours[:] = ring
            message.position += nbytes
            self._passed += rounded_up(nbytes, WORD)
            if message.position == message.nbytes:
                message.is_done = True
                self.messages.popleft()
            self._memory.announce(self._own_line, 0, self._passed)
        return self._passed != before

    def _pass_length(self, message: RingMessage, word: int) -> None:
        """Write (sender) or read (receiver) the message's length in the 8-byte word `word` of the ring buffer."""
        if self._sends:
            self._words[word] = message.nbytes
        self._memory.synchronize_at(self._address + WORD * word, WORD)
        nbytes, room = int(self._words.item(word)), message.nbytes
        if nbytes > room:
            raise TransportError(
                f"a message of {nbytes} bytes from rank {self._peer} does not fit into a buffer of {room} bytes; "
                "all ranks must sum payloads of one kind and length"
            )
        message.nbytes = nbytes


RING_BYTES = 2**20


class SharedMemoryTransport(Transport):
    """A transport through one memory region that all ranks map, used from one thread per rank.

    All ranks must create the transport at the same time.

    Args:
        opener: an existing transport between the same ranks, used to map the memory and to find lost ranks; its timeout
            is also the longest wait here.
        path: folder for the region's file, name of a new file, or a DAX device.
        ring_bytes: size of each ring buffer; there is one for each ordered pair of ranks.
        coherent: True if ranks see each other's stores without flushing caches; False to flush caches; None: as True,
            but refuse DAX devices.

    Raises:
        OptionError: there is not enough memory, the path does not exist, or memory is not coherent and caches cannot be
            flushed. The error is raised on all ranks.
    """

    @override
    def __init__(
        self,
        opener: Transport,
        path: str | Path = "/dev/shm",
        *,
        ring_bytes: int = RING_BYTES,
        coherent: bool | None = None,
    ) -> None:
        self._opener = opener
        self.members, self.names = range(opener.world_size), opener.names
        self.rank, self.world_size, self.timeout_s = opener.rank, opener.world_size, opener.timeout_s
        self.device = torch.device("cpu")
        self.ledger = Ledger()
        self._incoming: dict[int, ChannelEnd] = {}  # by the number of the other rank
        self._outgoing: dict[int, ChannelEnd] = {}
        if opener.world_size == 1:
            return
        pairs = list(itertools.permutations(range(opener.world_size), 2))
        nbytes = rounded_up(ring_bytes, PAGE)
        memory = map_together(
            opener,
            Path(path),
            2 * len(pairs),
            nbytes * len(pairs),
            coherent=coherent,
            smaller="fewer devices, more room there (a container's --shm-size)",
        )
        for index, (source, to) in enumerate(pairs):
            ring, line = memory.data[nbytes * index :][:nbytes], 2 * index
            if source == self.rank:
                self._outgoing[to] = ChannelEnd(memory, ring, (line, line + 1), opener.names[to], sends=True)
            elif to == self.rank:
                self._incoming[source] = ChannelEnd(memory, ring, (line + 1, line), opener.names[source], sends=False)

    @override
    def timeout_error(self, rank: int) -> TransportError:
        return self._opener.timeout_error(self.members[rank])

    @override
    def post(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        for tensor, _ in sends:
            self.ledger.book(tensor.nbytes)
        return self._start(sends, receives)

    @override
    def start_all_reduce_(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Pending:
        # each rank adds one part of all ranks' tensors in rank order, and sends the sum to all ranks
        if (n := self.world_size) == 1:
            return Pending()
        self.ledger.book(round(2 * (n - 1) / n * tensor.nbytes), from_formula=True)
        flat = tensor.view(-1)
        parts = [flat[start:end] for start, end in itertools.pairwise(balanced_borders(flat.numel(), n))]
        own = parts[self.rank]
        terms = [own.clone() for _ in range(n)]
        others = [rank for rank in range(n) if rank != self.rank]
        wait_all(self._start([(parts[rank], rank) for rank in others], [(terms[rank], rank) for rank in others]))
        sum_wires(terms, op, out=own)
        wait_all(self._start([(own, rank) for rank in others], [(parts[rank], rank) for rank in others]))
        return Pending()

    def _start(self, sends: Sequence[Send], receives: Sequence[Receive]) -> list[Pending]:
        with self.ledger.timed():
            pendings: list[Pending] = []
            for messages, ends in ((receives, self._incoming), (sends, self._outgoing)):
                for tensor, peer in messages:
                    message = RingMessage(peer, self._wait, tensor)
                    ends[self.members[peer]].messages.append(message)
                    pendings.append(message)
            self._advance()
            return pendings

    def _wait(self, message: MovedMessage, peer: int) -> None:
        patience = SpinThenSleep(self.timeout_s)
        with self.ledger.timed():
            while not message.is_done:
                if self._advance():
                    patience.looks = 0  # more may arrive soon
                elif not patience.pause():
                    raise self.timeout_error(peer)

    def _advance(self) -> bool:
        return sum(end.advance() for end in (*self._outgoing.values(), *self._incoming.values())) > 0
