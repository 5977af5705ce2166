"""ServerProcess, a child process that answers requests: it forks ranks, or keeps a virtual network."""

import contextlib
import multiprocessing
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, Self

from bench.core.environment import possible_causes
from bench.core.errors import RunFailed
from bench.core.processes import die_with_parent, killed_by

_STDERR = 2


class ServerProcess(subprocess.Popen[bytes]):
    """A child process that gets requests through a pipe and answers them one after the other.

    The child ends when this process ends, even if this process is killed. As a context manager, the object kills the
    child at the end of the block.

    Args:
        name: what the child is, for messages.
        command: the child's command line; the file descriptor of its end of the pipe is added as last argument.
        variables: environment variables to add to those of this process.

    Attributes:
        connection: this process's end of the pipe.
    """

    def __init__(self, name: str, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._name = name
        self.connection, far_end = multiprocessing.Pipe()
        with far_end:
            super().__init__(
                [*command, str(far_end.fileno())],
                pass_fds=[far_end.fileno()],
                env=os.environ | variables,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # the user sees the child's output, unless the child writes it to a log
                start_new_session=True,  # so Ctrl-C reaches only the launcher, which then stops the job
                preexec_fn=die_with_parent,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: object) -> None:
        """Send a request; if the child has ended, do nothing, because `receive` will fail."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(request)

    def receive(self) -> Any:
        """Wait for the answer to a request and return it.

        Raises:
            EOFError: the child has ended without an answer.
        """
        try:
            return self.connection.recv()
        except ConnectionResetError:  # the child ended before it read the request
            raise EOFError from None

    def call(self, request: object) -> Any:
        """Send a request and return the answer.

        Raises:
            Exception: the answer is this exception.
            RunFailed: the child ended before it answered.
        """
        self.send(request)
        try:
            answer = self.receive()
        except EOFError:
            raise RunFailed(f"{self.last_words()}{possible_causes()}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def last_words(self) -> str:
        """Wait until the child has ended; return a sentence with the signal that killed it, or its exit code."""
        exit_code = self.wait()
        return killed_by(self._name, -exit_code) if exit_code < 0 else f"{self._name} ended with code {exit_code}"

    def close(self) -> None:
        """Kill the child."""
        self.kill()
        self.wait()
        self.connection.close()
