"""Who a process is: a pid alone may be another's by the time somebody asks."""

from __future__ import annotations

import os
from pathlib import Path


def identity(pid: int | None = None) -> str | None:
    """Name a process of this machine uniquely, over reboots too; None when there is no such process."""
    pid = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The command's name, in parentheses, may hold spaces; the 22nd field is the start time in clock ticks.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else f"{boot}/{pid}/{fields[19]}"


def is_alive(name: str) -> bool:
    """Whether the process of that identity still runs on this machine."""
    pid = name.split("/")[1]
    return identity(int(pid)) == name
