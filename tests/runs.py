"""The `orch` command as a user types it, in a folder of its own; and what must be gone after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Wait until a condition holds, and return what it returned."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {timeout_s} s")


@dataclass
class Orch:
    """A user's shell: one folder, one database, one ORCH_HOME."""

    url: str
    folder: Path
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    def environment(self) -> dict[str, str]:
        self.home.mkdir(exist_ok=True)
        return {
            **os.environ,
            "ORCH_HOME": str(self.home),
            "ORCH_STORAGE": self.url,
            "ORCH_TEST": self.mark,
            **self.extra,
        }

    @property
    def mark(self) -> str:
        """What every process started from here carries in its environment."""
        return f"orch-test:{self.folder}"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "orchestrator.cli", *arguments],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, timeout_s: float = 170.0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        try:
            out, error = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, error = process.communicate()
            raise AssertionError(f"orch {' '.join(arguments)} did not end:\n{out}\n{error}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, error)

    def ok(self, *arguments: str) -> str:
        """Run a command that must succeed; returns its stdout."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"orch {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str) -> Any:
        return json.loads(self.ok(*arguments, "--json"))

    def refused(self, *arguments: str) -> str:
        """Run a command that must be refused with exit 1, nothing on stdout and one line; returns that line."""
        done = self.run(*arguments)
        assert done.returncode == 1, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        lines = [line for line in done.stderr.splitlines() if line.startswith("orch: ")]
        assert len(lines) == 1, done.stderr
        # A failed trial shows the user's own traceback, but never a frame of ours.
        assert "/orchestrator/" not in done.stderr, done.stderr
        return lines[0]

    def processes(self) -> list[psutil.Process]:
        """Every process that descends from a command started here, wherever it is attached now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("ORCH_TEST") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def left_behind(self) -> list[str]:
        """What still runs after a command has ended."""
        names = []
        for process in self.processes():
            try:
                names.append(" ".join(process.cmdline())[:100])
            except psutil.Error:
                continue
        return names

    def nothing_left(self) -> None:
        """Wait until no process of the commands run here is left."""
        wait_for(lambda: not self.left_behind(), f"processes left: {self.left_behind()}", 20.0)
