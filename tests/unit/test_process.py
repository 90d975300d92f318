"""Who a process is."""

from __future__ import annotations

import os
import subprocess

from orchestrator import process
from tests.runs import wait_for


def test_a_process_is_known_until_it_is_gone():
    """A process is alive by its identity until it has ended, also while nobody has reaped it."""
    child = subprocess.Popen(["sleep", "60"])
    name = process.identity(child.pid)
    assert name is not None
    assert process.is_alive(name)
    child.kill()
    wait_for(lambda: not process.is_alive(name), "the killed process is not alive")
    child.wait()
    assert process.identity(child.pid) is None


def test_a_pid_that_is_another_process_by_now_is_not_the_old_one():
    """The same pid with another start time is somebody else."""
    name = process.identity(os.getpid())
    assert name is not None
    assert process.is_alive(name)
    assert not process.is_alive(name.rpartition("/")[0] + "/1")


def test_a_process_of_another_container_counts_as_alive():
    """What cannot be seen from this PID namespace is not taken for dead."""
    boot, namespace, pid, start = (process.identity() or "").split("/")
    assert process.is_alive(f"{boot}/{int(namespace) + 1}/{pid}/{int(start) + 1}")
