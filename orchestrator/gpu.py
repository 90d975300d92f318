"""The GPUs of this machine, and which pool has them: a lock file per GPU, held as long as its Worker lives."""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from orchestrator.errors import PoolError


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver names it."""

    index: str
    uuid: str
    name: str


def list_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi shows; none where there is no driver."""
    command = ["nvidia-smi", "--query-gpu=index,uuid,name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.split(", ", 2) for line in done.stdout.splitlines() if line.count(", ") >= 2)
    return [Gpu(*row) for row in rows]


def visible_gpus() -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves to this process, in its order."""
    gpus = list_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return gpus
    chosen = [name.strip() for name in visible.split(",") if name.strip()]
    return [gpu for name in chosen for gpu in gpus if name == gpu.index or gpu.uuid.startswith(name)]


def free_gpus() -> list[Gpu]:
    """The visible GPUs that no Worker of any pool on this machine holds."""
    free = []
    for gpu in visible_gpus():
        try:
            hold(gpu.uuid).close()
            free.append(gpu)
        except PoolError:
            pass
    return free


def hold(uuid: str) -> IO[str]:
    """Take a GPU for this process; whoever holds it is written in its lock file.

    Raises:
        PoolError: a Worker of another pool has it.
    """
    path = Path(tempfile.gettempdir(), f"orch-gpu-{uuid}.lock")
    # Other users' pools take the same lock: anyone may open the file, and it holds nothing but a pid.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    file = os.fdopen(descriptor, "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = file.read().strip() or "unknown"
        file.close()
        raise PoolError(f"GPU {uuid} is held by another pool's Worker (pid {holder}): `ps -p {holder}`") from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file
