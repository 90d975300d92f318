"""One trial in the foreground of this process: no Ray, no fork, so that pdb and print work."""

from __future__ import annotations

import os
import socket
from typing import Any

from orchestrator import gpu, process, trainer
from orchestrator.files import checkpoint_root, log_root
from orchestrator.launcher import Outcome
from orchestrator.leader import TrialLeader
from orchestrator.session import Machine, StudySession
from orchestrator.trial import read_answer
from storage.attempts import NotTaken, Owner


class _Direct:
    """Carries rank 0's questions to the leader in the same process."""

    def __init__(self, leader: TrialLeader) -> None:
        self._leader = leader

    def ask(self, op: str, **arguments: Any) -> Any:
        """Ask, and get the answer at once."""
        answer = self._leader.answer(0, {"op": op, **arguments})
        if answer is None:
            raise SystemExit("the trial was ended from outside")
        return read_answer(answer)


def run_here(url: str, study: str, objective: str, folder: str) -> dict[str, Any] | NotTaken:
    """Take one trial of a study, train it here on one rank, settle it; returns what happened.

    Raises:
        StudyNotFound: there is no such study.
        KeyboardInterrupt: the trial was given back.
    """
    session = StudySession(url, study, str(log_root()), str(checkpoint_root()))
    found = gpu.visible_gpus()
    machine = Machine(socket.gethostname(), found[0].uuid if found else None, os.cpu_count() or 1)
    owner = Owner(f"{machine.host}-{os.getpid()}/here", machine.host, os.getpid(), process.identity() or "")
    try:
        leader = session.take(owner)
        if isinstance(leader, NotTaken):
            return leader
        job = session.job(leader, objective, folder)
        job |= {"rank": 0, "world_size": 1, **machine.job(leader.taken.token)}
        try:
            said = trainer.run(job, _Direct(leader))
        except BaseException:
            session.settle(leader, Outcome("stopped"))
            raise
        outcome = Outcome(said["kind"], tuple(said.get("values", ())), said.get("error"))
        return {**session.settle(leader, outcome), "log_path": "(above)"}  # nothing was redirected
    finally:
        session.close()
