"""Messages between a worker and the parameter server, over one link (a transport of two ranks) per worker.

One thread at each end uses the link. A worker sends one packed payload per layer, in the order in which backward
produces them, and a control message at the end of its clock (its step). The server answers with a control message and
one packed `Dense` payload per layer. The first two bytes distinguish control messages from payloads. The server keeps
receive buffers posted, enough for all messages of a clock if these need little memory, because a message without a
posted buffer waits for a round trip.

Bytes per worker and step: upwards the packed payloads and 24 bytes of control; downwards 16 + 4 m for each layer of m
elements and 24 bytes of control. The worker on the server's own rank sends nothing. Answers to `synchronize` are
counted as `replicas`.
"""

import collections
import dataclasses
import enum
import struct
from collections.abc import Sequence
from typing import ClassVar, Self

import torch

from collectives.parameter_server.server import Answer, ClockEnd, Session
from collectives.payloads.base import HEADER_BYTES, Payload, unpack
from collectives.payloads.fields import PayloadError
from collectives.transport import messages
from collectives.transport.base import Pending, Transport, wait_all

SERVER, WORKER = 0, 1  # ranks within a link
_MAGIC = 0x5357  # "WS" as bytes; payloads start with other bytes
_NONE = -1
_NO_CLOCK = ClockEnd(index=0, epoch=0, lr=0.0)
# Smallest number of posted buffers, and the total bytes that more of them may take. Each buffer is as long as the
# largest layer's message, but memory is only used for the bytes that a message fills.
_FEWEST_POSTED, _POSTED_BYTES = 8, 1 << 27


class Request(enum.IntEnum):
    """The command in a worker's control message to the server.

    APPLY and DROP end a clock: the server applies the gradients pushed in it, or discards them.
    """

    APPLY = 1
    DROP = 2
    SYNCHRONIZE = 3
    DISCONNECT = 4


@dataclasses.dataclass(frozen=True)
class ControlMessage:
    """A worker's control message to the server, 24 bytes.

    Attributes:
        command: the command to the server.
        clock_end: the worker's step, epoch and learning rate, if the command ends a clock.
    """

    FORM: ClassVar = struct.Struct("<HBxIIxxxxd")

    command: Request
    clock_end: ClockEnd = _NO_CLOCK

    def pack(self) -> torch.Tensor:
        """Return the message in packed form, uint8 [24]."""
        end = self.clock_end
        raw = self.FORM.pack(_MAGIC, self.command, end.index, end.epoch, end.lr)
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8)

    @classmethod
    def read(cls, message: torch.Tensor) -> Self | None:
        """Return the control message in a receive buffer, uint8 1-D, or None if the buffer holds a payload.

        Raises:
            PayloadError: the message's command is not a `Request`.
        """
        raw = message[: cls.FORM.size].numpy().tobytes()
        if len(raw) < cls.FORM.size or int.from_bytes(raw[:2], "little") != _MAGIC:
            return None
        _, command, index, epoch, lr = cls.FORM.unpack(raw)
        if command not in set(Request):
            raise PayloadError(f"a worker sent command {command}, which does not exist")
        return cls(Request(command), ClockEnd(index=index, epoch=epoch, lr=lr, dropped=command == Request.DROP))


# The server's control message before the parameters: magic number, staleness (-1: None), version, steps; 24 bytes.
_REPLY = struct.Struct("<HxxiQQ")
# Bytes of each control message, from a worker or from the server.
CONTROL_BYTES = ControlMessage.FORM.size


class RemoteServer:
    """One worker's interface to a parameter server in another process, over a link; used by one thread at a time.

    Args:
        link: transport of two ranks: the server is rank 0 and this worker is rank 1.
        numels: number of elements of every layer, in the order of their ids, which count from 0.

    Raises:
        PayloadError: there are more than 2^16 layers, which a payload's header cannot number.
    """

    def __init__(self, link: Transport, numels: Sequence[int]) -> None:
        self._bound, self._num_posted = _buffers(numels)
        self._link = link
        self._numels = numels
        self._sent: list[Pending] = []

    def push(self, layer_id: int, payload: Payload) -> None:
        """Send the encoded gradient of one layer to the server, as `Session.push` hands it over in one process."""
        payload.tensor_id = layer_id
        self._sent.append(self._link.send(messages.pack(payload, self._link, self._bound), SERVER))

    def end_clock(self, clock_end: ClockEnd) -> Answer:
        """End the current clock, as `Session.end_clock` does in the server's process."""
        return self._ask(ControlMessage(Request.DROP if clock_end.dropped else Request.APPLY, clock_end))

    def synchronize(self) -> Answer:
        """Wait until all workers have called `synchronize`, as `Session.synchronize` does in the server's process."""
        return self._ask(ControlMessage(Request.SYNCHRONIZE))

    def disconnect(self) -> None:
        """Tell the server that this worker sends nothing more.

        The message is sent once for each receive buffer that the server has posted, so that no buffer stays posted.
        """
        with self._link.counted_as("control"):
            message = ControlMessage(Request.DISCONNECT).pack()
            wait_all([self._link.send(message, SERVER) for _ in range(self._num_posted)])

    def _ask(self, control: ControlMessage) -> Answer:
        reply = torch.empty(_REPLY.size, dtype=torch.uint8)
        parameters = [torch.empty(HEADER_BYTES + 4 * numel, dtype=torch.uint8) for numel in self._numels]
        incoming = self._link.post([], [(buffer, SERVER) for buffer in (reply, *parameters)])
        with self._link.counted_as("control"):
            self._sent.append(self._link.send(control.pack(), SERVER))
        wait_all(self._sent)
        self._sent = []
        wait_all(incoming)
        magic, behind, version, num_steps = _REPLY.unpack(reply.numpy().tobytes())
        if magic != _MAGIC:
            raise PayloadError(f"the server's answer starts with {magic:#06x} instead of {_MAGIC:#06x}")
        return Answer(
            version=version,
            num_steps=num_steps,
            staleness=None if behind == _NONE else behind,
            parameters=parameters,
        )


def serve(link: Transport, session: Session, numels: Sequence[int]) -> None:
    """Serve the worker at the other end of a link until it disconnects.

    Args:
        link: transport of two ranks: this server is rank 0 and the worker is rank 1; no other thread may use it.
        session: the worker's session at the server.
        numels: number of elements of every layer, in the order of their ids, which count from 0.

    Raises:
        TransportError: the worker was lost, or did not send anything in time.
        PayloadError: the worker sent an invalid message.
    """
    bound, num_posted = _buffers(numels)
    posted: collections.deque[tuple[torch.Tensor, Pending]] = collections.deque()
    while True:
        while len(posted) < num_posted:
            buffer = torch.empty(bound, dtype=torch.uint8)
            posted.append((buffer, link.receive_into(buffer, WORKER)))
        message, pending = posted.popleft()  # the buffer may be longer than the message
        pending.wait()
        control = ControlMessage.read(message)
        if control is None:
            payload = unpack(message)
            if payload.tensor_id >= len(numels) or payload.numel != numels[payload.tensor_id]:
                raise PayloadError(
                    f"a worker pushed {payload.numel} elements for layer {payload.tensor_id}, "
                    "which does not exist or has another number of elements"
                )
            session.push(payload.tensor_id, payload)
        elif control.command is Request.DISCONNECT:
            wait_all([left for _, left in posted])  # a process group must not be destroyed while a buffer is posted
            return
        elif control.command is Request.SYNCHRONIZE:
            answer = session.synchronize()
            with link.counted_as("replicas"):
                _reply(link, answer)
        else:
            _reply(link, session.end_clock(control.clock_end))


def _reply(link: Transport, answer: Answer) -> None:
    behind = _NONE if answer.staleness is None else answer.staleness
    reply = _REPLY.pack(_MAGIC, behind, answer.version, answer.num_steps)
    with link.counted_as("control"):
        pending = link.send(torch.frombuffer(bytearray(reply), dtype=torch.uint8), WORKER)
    wait_all([pending, *link.post([(parameter, WORKER) for parameter in answer.parameters], [])])


def _buffers(numels: Sequence[int]) -> tuple[int, int]:
    """Return the size of the server's receive buffers in bytes, and how many it keeps posted for one worker."""
    if len(numels) > 2**16:
        raise PayloadError(f"a parameter server supports at most {2**16} layers; this model has {len(numels)}")
    bound = messages.bound_nbytes(max(numels, default=0), 1)
    return bound, min(max(_FEWEST_POSTED, _POSTED_BYTES // bound), len(numels) + 1)  # at most the messages of a clock
