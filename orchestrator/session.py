"""A process's hold on a study: takes its trials, says what a trainer must know of them, settles them."""

from __future__ import annotations

import math
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from orchestrator import search
from orchestrator.files import attempt_folder
from orchestrator.launcher import Outcome
from orchestrator.leader import TrialLeader, after_trial, storable
from orchestrator.spec import StudySpec, from_stored
from storage import StudyNotFound, attempts, open_database, open_storage, studies
from storage.attempts import NotTaken, Owner, Taken

# How an outcome ends the trial: Optuna's state, and the attempt's end_reason.
ENDINGS = {
    "complete": (TrialState.COMPLETE, "done"),
    "pruned": (TrialState.PRUNED, "pruned"),
    "error": (TrialState.FAIL, "error"),
    "refused": (TrialState.FAIL, "error"),
    "oom": (TrialState.FAIL, "oom"),
    "crash": (TrialState.FAIL, "crash"),
}


@dataclass(frozen=True)
class Machine:
    """What a job says of the machine and the place a rank runs on."""

    host: str
    gpu: str | None  # what Ray or CUDA calls the GPU; None on the CPU
    num_cpus: int
    master_host: str = "127.0.0.1"

    def job(self, token: str) -> dict[str, Any]:
        """The machine's part of a job."""
        environment = {"ORCH_ATTEMPT": token}
        if self.master_host == "127.0.0.1":
            # gloo would look the machine's name up, which need not resolve.
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        return {
            "host": self.host,
            "gpu": self.gpu,
            "num_cpus": self.num_cpus,
            "master_host": self.master_host,
            "environment": environment,
        }


class StudySession:
    """One connection to a study's database, with the study's own sampler and pruner."""

    def __init__(self, url: str, name: str, log_root: str, checkpoint_root: str) -> None:
        """Open a study, whose logs and checkpoints go below the two folders.

        Raises:
            StudyNotFound: there is no such study, or it has no definition.
        """
        self.database = open_database(url)
        record = studies.get(self.database, name)
        if record.spec is None:
            raise StudyNotFound(f"study {name!r} has no definition: `orch study create {name} --adopt` gives it one")
        self.name, self._log_root, self._checkpoint_root = name, log_root, checkpoint_root
        self.study_id = record.study_id
        self._uid = record.uid or ""
        self.spec: StudySpec = from_stored(record.spec)
        self.study = optuna.load_study(
            study_name=name,
            storage=open_storage(url),
            sampler=search.build_sampler(self.spec),
            pruner=search.build_pruner(self.spec),
        )

    def close(self) -> None:
        """Let go of the database."""
        self.database.close()
        remove = getattr(self.study._storage, "remove_session", None)
        if remove is not None:
            remove()

    def exists(self) -> bool:
        """Whether the study is still there."""
        return studies.find(self.database, self.name) is not None

    def take(self, owner: Owner) -> TrialLeader | NotTaken:
        """Take the next trial, or learn why there is none.

        Raises:
            StudyNotFound: the study was deleted.
        """
        token = uuid.uuid4()

        def log_path(number: int) -> str:
            return str(attempt_folder(self._log_root, self._uid, number, str(token)))

        taken = attempts.take(self.database, self.study_id, owner, token, log_path)
        if isinstance(taken, NotTaken):
            return taken
        # Optuna's cache writes only to trials that it has seen, and this one was made beside it.
        self.study._storage.get_all_trials(self.study_id, deepcopy=False)
        self.study.sampler = search.build_sampler(self.spec, taken.number)
        return TrialLeader(self.study, self.database, self.spec, taken)

    def job(self, leader: TrialLeader, objective: str, folder: str) -> dict[str, Any]:
        """What every rank of a trial must know, beside its machine and its rank."""
        taken = leader.taken
        return {
            **leader.job(),
            "token": taken.token,
            "objective": objective,
            "folder": folder,
            "settings": self.spec.settings,
            "seed": search.seed_of(self.spec, taken.number, "trial"),
            "checkpoint_folder": str(self._checkpoint_folder(taken)),
            "resume": taken.checkpoint_path,
            "log_path": taken.log_path,
        }

    def settle(self, leader: TrialLeader, outcome: Outcome) -> dict[str, Any]:
        """Write how a trial ended, in one transaction; returns the event for people."""
        taken = leader.taken
        if outcome.kind in ("stopped", "cancelled"):
            stopped = outcome.kind == "stopped"
            attempts.give_back(self.database, taken.token, "drained" if stopped else "cancelled")
            return {"event": "given_back" if stopped else "cancelled", "trial": taken.number}
        state, reason, values = self._ending(leader, outcome)
        after_trial(self.study, leader.frozen, state, values)
        error = None if outcome.error is None else storable(outcome.error)
        if not attempts.settle(self.database, taken.token, state.name, values, reason, error):
            return {"event": "cancelled", "trial": taken.number}
        if state is not TrialState.COMPLETE:
            # Nobody goes on from it; the folder of the trial holds those of its earlier attempts, too.
            shutil.rmtree(self._checkpoint_folder(taken).parent, ignore_errors=True)
        return {
            "event": "settled",
            "trial": taken.number,
            "state": state.name,
            "reason": reason,
            "value": values[0] if values else None,
            "steps": len(leader.frozen.intermediate_values),
            "error": error,
            "log_path": os.fspath(Path(taken.log_path, f"rank{outcome.rank}.log")),
        }

    def _checkpoint_folder(self, taken: Taken) -> Path:
        return attempt_folder(self._checkpoint_root, self._uid, taken.number, taken.token)

    def _ending(self, leader: TrialLeader, outcome: Outcome) -> tuple[TrialState, str, list[float] | None]:
        state, reason = ENDINGS[outcome.kind]
        heeded = outcome.kind == "pruned" and leader.diverged
        if heeded or any(math.isnan(value) for value in outcome.values):
            return TrialState.PRUNED, "nan", None
        trial = leader.frozen
        if outcome.kind == "pruned" and trial.last_step is not None:
            return state, reason, [trial.intermediate_values[trial.last_step]]  # as Optuna's own tell does
        return state, reason, list(outcome.values) or None
