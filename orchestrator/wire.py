"""Messages between a Worker and its trainer: one JSON object a line over a socket.

JSON and not pickle, because the trainer runs code of the user's and the Worker holds the database: nothing that comes
from a trainer can make the Worker do more than answer. JSON carries float64 exactly (Python writes the shortest digits
that read back the same), integers of any size, NaN and the infinities.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Sequence
from typing import Any, Protocol

Message = dict[str, Any]
# More than any sane attribute; a runaway trainer must not fill the Worker's memory.
MAX_LINE = 64 * 1024 * 1024


class Readable(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """The file descriptor to poll."""


def wait_readable(sources: Sequence[Readable], timeout_s: float | None = None) -> list[Readable]:
    """Wait until something can be read from a source, or it was closed; empty after the timeout.

    `select.select` would do, but for descriptors above 1023, which a process inside Ray may have.
    """
    poll = select.poll()
    by_fd = {source.fileno(): source for source in sources}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)]


class Channel:
    """One end of a stream of messages."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def fileno(self) -> int:
        """Let selectors wait on the channel."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message, whole.

        Raises:
            OSError: the other end is gone.
        """
        self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """Wait for the next message; None when the other end is closed."""
        while True:
            message = self.take()
            if message is not None:
                return message
            if not self.fill():
                return None

    def fill(self) -> bool:
        """Read once what has arrived; False at the end of the stream."""
        try:
            data = self._sock.recv(65536)
        except ConnectionResetError:
            return False
        self._buffer += data
        if len(self._buffer) > MAX_LINE:
            raise ValueError(f"a message from the trainer is longer than {MAX_LINE} bytes")
        return bool(data)

    def take(self) -> Message | None:
        """The next complete message of what was read, or None."""
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError("a message is a JSON object")
        return message

    def close(self) -> None:
        """Close this end."""
        self._sock.close()
