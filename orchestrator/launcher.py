"""A Worker's end of the nursery: asks it for trainers, answers a trainer until it has said how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import PoolError
from orchestrator.objective import without_secrets
from orchestrator.wire import Channel, Message, wait_readable

START_TIMEOUT_S = 300  # importing torch from a cold network disk
EXIT_GRACE_S = 5.0  # from the answer to "outcome" to the end of the process


@dataclass(frozen=True)
class Outcome:
    """How a rank, or the whole trial, ended."""

    kind: str  # complete, pruned, refused, error, oom, crash, stopped, cancelled
    values: tuple[float, ...] = ()
    error: str | None = None
    rank: int = 0

    @property
    def failed(self) -> bool:
        """Whether the other ranks have to be stopped."""
        return self.kind not in ("complete", "pruned")


Answer = Callable[[Message], Message | None]


class Nursery:
    """The warm parent of this Worker's trainers: started at once, waited for when the first trainer is wanted."""

    def __init__(self, objective: str, folder: str, *, gpu: bool) -> None:
        self._setup = json.dumps({"objective": objective, "folder": folder})
        self._gpu = gpu
        self._control: socket.socket | None = None
        self.cold: str | None = None  # why trainers import the objective themselves, once it is known
        self._ready = False

    def start(self) -> None:
        """Start the process, in a session of its own; importing torch takes some seconds, which are not waited for."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "orchestrator.nursery", str(theirs.fileno()), self._setup]
        with theirs:
            # The process forks and leaves at once: what stays is a child of nobody (see orchestrator.nursery).
            subprocess.run(command, env=self._environment(), pass_fds=[theirs.fileno()], check=True)
        self._control, self._ready = ours, False

    def wait(self) -> socket.socket:
        """Wait until trainers can be forked; a nursery that died is started again.

        Raises:
            PoolError: it cannot be started.
        """
        if self._control is None:
            self.start()
            assert self._control is not None
        if not self._ready:
            self._control.settimeout(START_TIMEOUT_S)
            try:
                event = self.event()
            except TimeoutError:
                event = None
            if event is None or self._control is None:
                raise PoolError("the trainers' parent process could not start: run `orch doctor` on this machine")
            self._control.settimeout(None)
            self.cold, self._ready = event["cold"], True
        return self._control

    def launch(self) -> Trainer:
        """Fork a trainer that waits for its job.

        Raises:
            PoolError: the nursery cannot be started.
        """
        for _ in range(2):
            ours, theirs = socket.socketpair()
            with theirs, contextlib.suppress(OSError):
                socket.send_fds(self.wait(), [b'{"do": "start"}'], [theirs.fileno()])
                event = self.event()
                if event is not None and event["event"] == "started":
                    return Trainer(self, Channel(ours), event["pid"])
            # It died since its last trial: a new one is started, once.
            ours.close()
            self.close()
        raise PoolError("the nursery ended while it started a trainer; the Worker's log in Ray's folder tells why")

    def event(self) -> Message | None:
        """Wait for what the nursery says next; None when it is gone."""
        assert self._control is not None
        data = self._control.recv(65536)
        if not data:
            self.close()
            return None
        event: Message = json.loads(data)
        return event

    def kill(self) -> None:
        """End the trainer that runs, with everything it started."""
        if self._control is not None:
            self._control.send(b'{"do": "kill"}')

    def fileno(self) -> int:
        """Let `select` wait for the next event."""
        assert self._control is not None
        return self._control.fileno()

    def close(self) -> None:
        """Let go of the nursery: it ends its trainer and leaves."""
        if self._control is not None:
            self._control.close()
            self._control = None

    def _environment(self) -> dict[str, str]:
        environment = without_secrets()
        # No thread pools before the fork, and no CUDA: people write torch.cuda.is_available() at module level.
        environment.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
        if not self._gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment


class Trainer:
    """One rank's process, as its Worker sees it."""

    def __init__(self, nursery: Nursery, channel: Channel, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._channel = channel
        self._exit: int | None = None
        self._token = ""
        self._last: int | None = None  # the id of the message that said how it ended
        self._stop_reader, self._stop_writer = socket.socketpair()

    def serve(self, job: Message, answer: Answer) -> Outcome:
        """Send the job, answer until the trainer says how it ended or is gone; it then waits for `release`.

        An answer of None ends the trainer as ``cancelled``: its trial is not this Worker's any more.
        """
        self._token = job["token"]
        try:
            self._channel.send(job)
            return self._converse(answer, job["rank"])
        except OSError:
            self._wait_for_exit()
            return self._crash(job["rank"])
        except ValueError as error:  # no message of ours: too long, or not JSON
            self._end("error", job["rank"])
            return Outcome(
                "error", error=f"rank {job['rank']} sent what its Worker cannot read: {error}", rank=job["rank"]
            )

    def stop(self) -> None:
        """End the trainer; callable from any thread, `serve` then returns ``stopped``."""
        self._stop_writer.send(b"x")

    def release(self) -> None:
        """Let the trainer leave: the answer to its last message."""
        with contextlib.suppress(OSError):  # it is gone already
            self._channel.send({"ok": None, "id": self._last})

    def bury(self) -> None:
        """Wait until the trainer and all it started are gone, and kill what lingers."""
        if self._exit is None:
            if not wait_readable([self._nursery], EXIT_GRACE_S):
                self._nursery.kill()
            self._wait_for_exit()
        self._channel.close()
        self._stop_reader.close()
        self._stop_writer.close()

    def _converse(self, answer: Answer, rank: int) -> Outcome:
        while True:
            while (message := self._channel.take()) is not None:
                if message["op"] == "outcome":
                    self._last = message["id"]
                    return Outcome(message["kind"], tuple(message.get("values", ())), message.get("error"), rank)
                reply = answer({key: value for key, value in message.items() if key != "id"})
                if reply is None:
                    return self._end("cancelled", rank)
                self._channel.send({**reply, "id": message["id"]})
            ready = wait_readable([self._channel, self._nursery, self._stop_reader])
            if self._stop_reader in ready:
                return self._end("stopped", rank)
            if self._channel in ready and not self._channel.fill():
                self._wait_for_exit()
                return self._crash(rank)
            if self._nursery in ready and self._channel not in ready:
                self._wait_for_exit()
                return self._crash(rank)

    def _end(self, kind: str, rank: int) -> Outcome:
        self._nursery.kill()
        self._wait_for_exit()
        return Outcome(kind, rank=rank)

    def _wait_for_exit(self) -> None:
        """The channel is closed or the trainer was killed: it ends now, and if it lingers it is killed."""
        if self._exit is not None:
            return
        if not wait_readable([self._nursery], EXIT_GRACE_S):
            self._nursery.kill()
        event = self._nursery.event()
        if event is not None:
            self._exit = event["exit"]
        else:
            self._exit = -signal.SIGKILL  # the nursery is gone, and took the trainer along
            _sweep(self._token)

    def _crash(self, rank: int) -> Outcome:
        assert self._exit is not None
        how = f"was killed by signal {-self._exit}" if self._exit < 0 else f"left with exit code {self._exit}"
        return Outcome("crash", error=f"the trainer of rank {rank} {how} before the objective returned", rank=rank)


def _sweep(token: str) -> None:
    """Kill what a trainer left behind, when the nursery that would have done it is dead: known by its environment."""
    mark = f"ORCH_ATTEMPT={token}".encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if mark in Path("/proc", pid, "environ").read_bytes().split(b"\0"):
                os.kill(int(pid), signal.SIGKILL)
