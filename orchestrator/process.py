"""Who a process is: a pid alone may be another's by the time somebody asks."""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int | None = None) -> str | None:
    """Name a process of this machine uniquely, over reboots too; None when there is no such process."""
    pid = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        # The command's name, in parentheses, may hold spaces; the 22nd field is the start time in clock ticks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else f"{boot}/{namespace}/{pid}/{fields[19]}"


def is_alive(name: str) -> bool:
    """Whether the process of that identity may still run on this machine.

    One in another PID namespace, a container's, cannot be seen from here, and counts as alive.
    """
    ours, theirs = (identity() or "").split("/"), name.split("/")
    if ours[0] == theirs[0] and ours[1] != theirs[1]:
        return True
    return identity(int(theirs[2])) == name
