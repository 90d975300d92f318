"""Trials in real trainers of a real nursery, with a leader that answers from a script; and what must be gone after."""

from __future__ import annotations

import contextlib
import os
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from orchestrator.launcher import Nursery, Outcome, Trainer
from orchestrator.wire import Message
from tests.runs import wait_for

MARK = "ORCH_TEST_NURSERY"

LEFTOVERS = {
    "loader workers": """
        import torch
        from torch.utils.data import DataLoader
        loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
        KEPT.append((loader, list(loader)))
    """,
    "a subprocess": """
        import subprocess
        subprocess.Popen(["sleep", "1000"])
    """,
    "a daemon": """
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        os.wait()
    """,
}
FOREVER = """
    def objective(trial):
        trial.report(1.0, 1)
        while True:
            pass
"""


def leaving(*kinds: str, end: str = "return 1.0") -> str:
    """An objective that starts such processes, and then ends."""
    bodies = "".join(LEFTOVERS[kind].replace("\n        ", "\n    ") for kind in kinds)
    return f"KEPT = []\ndef objective(trial):{bodies}\n    trial.report(1.0, 1)\n    {end}\n"


class StubLeader:
    """Answers a trainer: parameters are 0.5, verdicts are False unless `prune`; keeps every message."""

    def __init__(self, *, prune: bool = False) -> None:
        self.messages: list[Message] = []
        self.prune = prune
        self.reported = threading.Event()

    def answer(self, message: Message) -> Message | None:
        self.messages.append(message)
        if message["op"] == "report":
            self.reported.set()
        return {"ok": {"suggest": 0.5, "should_prune": self.prune}.get(message["op"])}

    @property
    def attributes(self) -> dict[str, Any]:
        return {message["key"]: message["value"] for message in self.messages if message["op"] == "set_user_attr"}


class Playground:
    """One nursery, and the objective files that its trials run."""

    def __init__(self, folder: Path, warm: str = "def objective(trial):\n    return 1.0\n") -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.warm = self.write("warm.py", warm)
        self.nursery = Nursery(f"{self.warm}:objective", str(folder), gpu=False)

    def start(self) -> None:
        with self.marked():
            self.nursery.start()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return path

    def job(self, objective: Path, **changes: Any) -> dict[str, Any]:
        return {
            "study_name": "s",
            "directions": ["MINIMIZE"],
            "number": 7,
            "params": {},
            "user_attrs": {},
            "datetime_start": None,
            "token": "token",
            "objective": f"{objective}:objective",
            "folder": str(self.folder),
            "settings": {},
            "seed": 12,
            "checkpoint_folder": str(self.folder / "checkpoints"),
            "resume": None,
            "log_path": str(self.folder / "log"),
            "host": "here",
            "gpu": None,
            "num_cpus": 1,
            "master_host": "127.0.0.1",
            "environment": {"ORCH_ATTEMPT": "token"},
            "rank": 0,
            "world_size": 1,
            **changes,
        }

    def run(
        self,
        text: str,
        leader: StubLeader | None = None,
        meanwhile: Callable[[Trainer], None] | None = None,
        **changes: Any,
    ) -> Outcome:
        """Run an objective's source as one trial to its end; nothing of it may be left."""
        objective = self.write(f"objective_{uuid.uuid4().hex[:8]}.py", text)
        return self.run_file(objective, leader, meanwhile, **changes)

    def run_file(
        self,
        objective: Path,
        leader: StubLeader | None = None,
        meanwhile: Callable[[Trainer], None] | None = None,
        **changes: Any,
    ) -> Outcome:
        trainer = self.nursery.launch()
        helper = threading.Thread(target=meanwhile or (lambda trainer: None), args=(trainer,))
        helper.start()
        try:
            return trainer.serve(self.job(objective, **changes), (leader or StubLeader()).answer)
        finally:
            trainer.release()
            trainer.bury()
            helper.join()
            assert self.left_behind() == []

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Processes that are started meanwhile carry the mark."""
        os.environ[MARK] = self.mark
        try:
            yield
        finally:
            del os.environ[MARK]

    def processes(self) -> list[psutil.Process]:
        """Everything that descends from the nursery, wherever it is attached now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def nursery_process(self) -> psutil.Process:
        return next(p for p in self.processes() if "orchestrator.nursery" in p.cmdline() and p.ppid() == 1)

    def left_behind(self) -> list[str]:
        """What runs besides the nursery."""
        lines = []
        for process in self.processes():
            try:
                if not ("orchestrator.nursery" in process.cmdline() and self._is_nursery(process)):
                    lines.append(" ".join(process.cmdline())[:80])
            except psutil.Error:
                continue
        return lines

    def _is_nursery(self, process: psutil.Process) -> bool:
        parent = process.parent()
        return parent is None or "orchestrator.nursery" not in parent.cmdline()

    def close(self) -> None:
        self.nursery.close()
        wait_for(lambda: not self.processes(), "the nursery and all it started are gone", 20.0)
