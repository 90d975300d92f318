"""The fresh process of one trial and one rank: builds the Trial, calls the objective, says how it ended.

It holds no credentials and never sees the database: everything it asks goes over one socket to its Worker.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna

from objectives.checkpoint import Checkpoint
from orchestrator import objective as objective_code
from orchestrator.trial import Asks, Leader, Refused, Trial
from orchestrator.wire import Channel

# A collective that takes longer than this has lost a rank; the longest legitimate wait is one rank's evaluation.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def main(sock: socket.socket) -> None:
    """Run one rank of one trial; the job is the first message on the socket, the outcome the last."""
    sock.settimeout(None)  # whatever default the objective's module has set
    channel = Channel(sock)
    job = channel.receive()
    if job is None:
        return
    _redirect_output(Path(job["log_path"]), job["rank"])
    leader = Leader(channel)
    try:
        outcome = run(job, leader)
    except KeyboardInterrupt as error:  # raised by the objective: nobody presses Ctrl-C here
        outcome = _failure(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the objective may have closed or replaced it
            stream.flush()
    # The answer comes when every rank has said how it ended: until then rank 0 keeps the rendezvous open for the rest.
    leader.ask("outcome", **outcome)


def run(job: dict[str, Any], leader: Asks) -> dict[str, Any]:
    """Call the objective, and put into words how it ended.

    Raises:
        KeyboardInterrupt: somebody debugs it in the foreground, and had enough.
    """
    try:
        _prepare(job, leader)
        function = objective_code.load(job["objective"], job["folder"])
        value = function(_build_trial(job, leader))
        return {"kind": "complete", "values": _floats(value, len(job["directions"]))}
    except optuna.TrialPruned:
        return {"kind": "pruned"}
    except Refused as error:
        return {"kind": "refused", "error": str(error)}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    text = _traceback(error)
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr)
    return {"kind": "oom" if _is_out_of_memory(error) else "error", "error": text}


def _build_trial(job: dict[str, Any], leader: Asks) -> Trial:
    checkpoint = Checkpoint(
        Path(job["checkpoint_folder"]),
        resume=None if job["resume"] is None else Path(job["resume"]),
        rank=job["rank"],
        on_save=lambda step, path: leader.ask("checkpoint", step=step, path=str(path)),
    )
    return Trial(leader, job, checkpoint, _device_of(job))


def _device_of(job: dict[str, Any]) -> Callable[[], str]:
    def device() -> str:
        if not job["gpu"]:
            return "cpu"
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError(
                f"this Worker was given GPU {job['gpu']}, but torch cannot use it: run `orch doctor` on {job['host']}"
            )
        return "cuda:0"

    return device


def _prepare(job: dict[str, Any], leader: Asks) -> None:
    """Seeds, threads, and the process group of a trial with several ranks."""
    import numpy as np
    import torch

    random.seed(job["seed"])
    np.random.seed(job["seed"] % 2**32)
    torch.manual_seed(job["seed"])
    torch.set_num_threads(job["num_cpus"])
    os.environ["OMP_NUM_THREADS"] = str(job["num_cpus"])
    os.environ.update(job["environment"])
    if job["world_size"] > 1:
        _join_process_group(job, leader)


def _join_process_group(job: dict[str, Any], leader: Asks) -> None:
    """Meet the other ranks at a port that rank 0 lets the system choose, so that no two trials can collide."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore  # torch.distributed's, which its stubs do not export

    rank, world_size, host = job["rank"], job["world_size"], job["master_host"]
    if rank == 0:
        store = TCPStore(host, 0, world_size, is_master=True, wait_for_workers=False)
        leader.ask("rendezvous_open", port=store.port)
    else:
        store = TCPStore(host, leader.ask("rendezvous"), world_size, is_master=False)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(store.port)
    )
    backend = "nccl" if _device_of(job)().startswith("cuda") else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=COLLECTIVE_TIMEOUT)


def _floats(value: Any, n_objectives: int) -> list[float]:
    """What the objective returned, as one float per objective."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if len(values) != n_objectives:
        raise ValueError(f"the objective returned {len(values)} values, but the study has {n_objectives} directions")
    try:
        return [float(item) for item in values]
    except (TypeError, ValueError):
        raise TypeError(f"the objective must return a float, not {value!r:.80}") from None


def _traceback(error: BaseException) -> str:
    """The traceback without the frames of orch itself: the first line people see is their own code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _is_ours(file: str) -> bool:
    return Path(file).parent == Path(__file__).parent or file.startswith("<frozen importlib")


def _is_out_of_memory(error: BaseException) -> bool:
    import torch

    return isinstance(error, torch.cuda.OutOfMemoryError)


def _redirect_output(folder: Path, rank: int) -> None:
    """Send everything that this process and its children print to the rank's own file."""
    folder.mkdir(parents=True, exist_ok=True)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Lines reach the file as they are printed: the file is read while the trial runs, and after a kill.
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, io.TextIOWrapper):  # a module may have put something of its own in sys.stdout
            stream.reconfigure(line_buffering=True)
