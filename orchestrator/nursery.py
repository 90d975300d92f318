"""The warm parent of trainers: has imported torch and the objective, never touched CUDA or the database.

``python -m orchestrator.nursery FD`` detaches itself from the Ray actor (an actor that leaves kills its children
first, and so the only process that could clean up), then answers the actor's requests on the socket FD: ``start``,
with the trainer's socket beside it, forks a trainer; ``kill`` ends it. At the end of the stream, however the actor
died, the nursery ends every process that its trainers left, and leaves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# jemalloc (pyarrow brings it, pandas imports that) has fork handlers of its own, which start its thread again.
FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
# What the first trial would import anyway: torch._dynamo alone costs 2 s when the first optimizer is built.
PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "orchestrator.trainer",
)


def main() -> None:
    """Detach, import, and serve the actor until it is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = json.loads(sys.argv[2])
    _detach()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _preload()
    cold = setup.get("cold") or _preload_objective(setup["objective"], setup["folder"])
    _send(control, {"event": "ready", "pid": os.getpid(), "cold": cold})
    _serve(control)


def _detach() -> None:
    """Become nobody's child, in a session of its own, deaf to the terminal's Ctrl-C."""
    if os.fork():
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _preload() -> None:
    """Import what every trainer needs."""
    for name in PRELOAD:
        importlib.import_module(name)
    import torch

    # torch starts its thread pool in the first parallel operation; one that a fork lost would hang the child.
    torch.set_num_threads(1)


def _preload_objective(reference: str, folder: str) -> str | None:
    """Import the objective's module too; returns why it is left to the trainers instead, or None when it is warm."""
    import torch

    from orchestrator.objective import load

    threads = _threads()
    try:
        load(reference, folder)
    except BaseException as error:
        # Creation checked it, so this machine differs; the trainer raises it again, into the trial's log.
        return f"its import fails here: {error}"
    if torch.cuda.is_initialized():
        return _begin_again("its module touches CUDA when imported")
    if _threads() > threads:
        return _begin_again("its module starts threads when imported")
    if _children():
        # They would be taken for what a trial left behind, and killed after the first one.
        return _begin_again("its module starts processes when imported")
    return None


def _begin_again(reason: str) -> NoReturn:
    """A process that holds CUDA or threads must not be forked: start over, this time without the objective."""
    for pid in _children():
        os.kill(pid, signal.SIGKILL)
    setup = json.dumps({**json.loads(sys.argv[2]), "cold": reason})
    os.execv(sys.executable, [sys.executable, "-P", "-m", "orchestrator.nursery", sys.argv[1], setup])


def _threads() -> int:
    """How many threads a fork would lose without anybody's knowing."""
    names = (Path(f"/proc/self/task/{thread}/comm") for thread in os.listdir("/proc/self/task"))
    return sum(name.read_text().strip() not in FORK_SAFE_THREADS for name in names)


def _serve(control: socket.socket) -> None:
    """Fork a trainer for each ``start``; report when it ended; until the actor closes its end."""
    trainer: int | None = None
    pidfd = -1
    while True:
        waiting: list[Any] = [control] if trainer is None else [control, pidfd]
        ready, _, _ = select.select(waiting, [], [])
        if pidfd in ready and trainer is not None:
            status = _bury(trainer)
            os.close(pidfd)
            trainer, pidfd = None, -1
            _send(control, {"event": "ended", "exit": status})
        if control in ready:
            data, fds, _, _ = socket.recv_fds(control, 65536, 1)
            if not data:
                if trainer is not None:
                    _bury(trainer)
                return
            request = json.loads(data)
            if request["do"] == "start":
                trainer = _fork(control, fds[0])
                pidfd = os.pidfd_open(trainer)
                _send(control, {"event": "started", "pid": trainer})
            elif request["do"] == "kill" and trainer is not None:
                _kill(trainer)


def _kill(trainer: int) -> None:
    """End the trainer and its group, which it may not have made yet."""
    try:
        os.killpg(trainer, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(trainer, signal.SIGKILL)


def _fork(control: socket.socket, fd: int) -> int:
    """Fork a trainer: in the child this never returns."""
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    status = 1
    try:
        os.setsid()
        # A trainer that outlives its nursery would train for nobody.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # A copy of the actor's socket here would keep the nursery from ever seeing the actor's end.
        control.close()
        from orchestrator import trainer

        trainer.main(socket.socket(fileno=fd))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Skips the interpreter's own exit: atexit hooks and threads inherited from the nursery are not the trial's.
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _bury(trainer: int) -> int:
    """End the trainer's group and everything it left behind; returns its exit code, or minus its signal.

    The group is killed before its leader is reaped, or the number could be another group's by then. Orphans in
    sessions of their own come to this process, their subreaper, and are killed until none is left.
    """
    _kill(trainer)
    _, status = os.waitpid(trainer, 0)
    while True:
        orphans = _children()
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)  # a killed child takes a moment to become a zombie


def _children() -> list[int]:
    with open(f"/proc/self/task/{threading.get_native_id()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def _send(control: socket.socket, event: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the actor is gone: the next read says so
        control.send(json.dumps(event).encode())


if __name__ == "__main__":
    main()
