"""The Ray actor pinned to one GPU: takes a trial, runs it, settles it, and again.

A Worker either leads (it owns the database session of its trials) or is a member that lends its GPU to a leader.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import optuna
import ray
from optuna.trial import TrialState

import storage
from orchestrator import gpu as gpus
from orchestrator import objective as objective_code
from orchestrator import process, search
from orchestrator.errors import ObjectiveError, PoolError
from orchestrator.gang import Gang
from orchestrator.launcher import Nursery, Outcome, Trainer
from orchestrator.leader import TrialLeader, after_trial
from orchestrator.spec import StudySpec, from_stored
from storage import attempts, studies
from storage.attempts import NotTaken, Taken
from storage.errors import StudyNotFound

BUSY_POLL_S = 0.2  # the rest of the budget is with other Workers: one of them may give it back


@dataclass(frozen=True)
class WorkerConfig:
    """What every Worker of a pool is told, beside the storage URL."""

    name: str
    study: str
    objective: str  # resolved on the pool's machine: a module, or an absolute path
    folder: str
    sha256: str
    gpu: bool
    num_cpus: int
    checkpoint_root: str
    log_root: str


@dataclass(frozen=True)
class WorkerPlace:
    """Where Ray put a Worker."""

    node_id: str
    ip: str
    host: str
    gpu: str | None


# How an outcome ends the trial: Optuna's state, and the attempt's end_reason.
ENDINGS = {
    "complete": (TrialState.COMPLETE, "done"),
    "pruned": (TrialState.PRUNED, "pruned"),
    "error": (TrialState.FAIL, "error"),
    "refused": (TrialState.FAIL, "error"),
    "oom": (TrialState.FAIL, "oom"),
    "crash": (TrialState.FAIL, "crash"),
}


class Worker:
    """Made a Ray actor by the pool, with the concurrency groups ``gang`` and ``control``."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._host = socket.gethostname()
        self._lock: IO[str] | None = None
        self._nursery = Nursery(config.objective, config.folder, gpu=config.gpu)
        self._members: list[Any] = []
        self._master_host = "127.0.0.1"
        self._gang: Gang | None = None
        self._lent: tuple[str, Trainer] | None = None
        self._halted: str | None = None
        self._draining = threading.Event()
        self._halting = threading.Event()
        self._events: deque[dict[str, Any]] = deque()
        self._running: tuple[int, float, TrialLeader] | None = None

    def place(self) -> WorkerPlace:
        """Take the GPU, check the objective's file, start the nursery; returns where this is.

        Raises:
            PoolError: Ray gave no GPU, or another pool holds it.
            ObjectiveError: this machine's copy of the objective is not the study's.
        """
        gpu = self._take_gpu() if self._config.gpu else None
        here = objective_code.read_source(self._config.objective, self._config.folder)
        if here.sha256 != self._config.sha256:
            raise ObjectiveError(
                f"{here.path} on {self._host} is not the objective of the pool: sha256 {here.sha256[:12]}, "
                f"expected {self._config.sha256[:12]}"
            )
        self._nursery.start()
        context = ray.get_runtime_context()
        return WorkerPlace(context.get_node_id(), ray.util.get_node_ip_address(), self._host, gpu)

    def lead(self, members: list[Any], master_host: str) -> None:
        """Become the leader of a gang: rank 0 here, the others in `members`."""
        self._members = members
        self._master_host = master_host

    def work(self, url: str) -> str:
        """Run trials until the study is done or the Worker is told to leave; returns why it ended.

        Raises:
            StudyNotFound: the study was deleted.
            ObjectiveError: the objective does something that no trial of this study can survive.
        """
        database = storage.open_database(url)
        record = studies.get(database, self._config.study)
        if record.spec is None:
            raise StudyNotFound(f"study {record.name!r} has no definition: `orch study create {record.name} --adopt`")
        spec = from_stored(record.spec)
        study = optuna.load_study(
            study_name=record.name,
            storage=storage.open_storage(url),
            sampler=search.build_sampler(spec),
            pruner=search.build_pruner(spec),
        )
        try:
            return self._loop(database, study, spec)
        except KeyError:
            # Optuna's storage says so of a row that is gone.
            if studies.find(database, self._config.study) is None:
                raise StudyNotFound(f"study {record.name!r} was deleted while it ran") from None
            raise
        finally:
            database.close()

    def _loop(self, database: storage.Database, study: optuna.Study, spec: StudySpec) -> str:
        while not self._draining.is_set():
            taken = self._take(database, study)
            if taken is NotTaken.BUSY:
                self._draining.wait(BUSY_POLL_S)
            elif isinstance(taken, NotTaken):
                return taken.name.lower()
            else:
                study.sampler = search.build_sampler(spec, taken.number)
                leader = TrialLeader(study, database, spec, taken)
                outcome = self._run(leader, spec, taken)
                self._settle(database, study, leader, taken, outcome)
        return "halted" if self._halting.is_set() else "drained"

    def _take(self, database: storage.Database, study: optuna.Study) -> Taken | NotTaken:
        owner = attempts.Owner(
            self._config.name, self._host, os.getpid(), process.identity() or "", tuple(map(str, ray.get_gpu_ids()))
        )
        token = uuid.uuid4()
        folder = Path(self._config.log_root, f"study-{study._study_id}")
        return attempts.take(
            database,
            study._study_id,
            owner,
            token,
            lambda number: str(folder / f"trial-{number:06d}" / f"attempt-{token.hex[:8]}"),
        )

    def _run(self, leader: TrialLeader, spec: StudySpec, taken: Taken) -> Outcome:
        """Train the trial on all ranks of the gang."""
        self._gang = Gang(leader, self._job(leader, spec, taken), self._members)
        self._running = (taken.number, time.monotonic(), leader)
        self._tell("started", taken.number)
        if self._halting.is_set():
            self._gang.stop()
        try:
            return self._gang.run(self._nursery)
        finally:
            self._gang = None

    def _job(self, leader: TrialLeader, spec: StudySpec, taken: Taken) -> dict[str, Any]:
        study_folder = Path(self._config.checkpoint_root, f"study-{leader.study_id}")
        return {
            **leader.job(),
            "token": taken.token,
            "objective": self._config.objective,
            "folder": self._config.folder,
            "settings": spec.settings,
            "seed": search.seed_of(spec, taken.number, "trial"),
            "world_size": 1 + len(self._members),
            "master_host": self._master_host,
            "checkpoint_folder": str(study_folder / f"trial-{taken.number:06d}" / f"attempt-{taken.token[:8]}"),
            "resume": taken.checkpoint_path,
            "log_path": taken.log_path,
            **self._machine(taken.token),
        }

    def _machine(self, token: str) -> dict[str, Any]:
        """What a job says of the machine a rank runs on."""
        environment = {"ORCH_ATTEMPT": token}
        if self._master_host == "127.0.0.1":
            # gloo would look the machine's name up, which need not resolve.
            environment["GLOO_SOCKET_IFNAME"] = "lo"
        return {
            "host": self._host,
            "gpu": ",".join(map(str, ray.get_gpu_ids())) if self._config.gpu else None,
            "num_cpus": self._config.num_cpus,
            "environment": environment,
        }

    def _settle(
        self, database: storage.Database, study: optuna.Study, leader: TrialLeader, taken: Taken, outcome: Outcome
    ) -> None:
        """Write how the trial ended: one transaction, and one event for the pool."""
        trial, number = leader.frozen, taken.number
        started = self._running[1] if self._running else time.monotonic()
        self._running = None
        if outcome.kind in ("stopped", "cancelled"):
            attempts.give_back(database, taken.token, "drained" if outcome.kind == "stopped" else "cancelled")
            self._tell("given_back" if outcome.kind == "stopped" else "cancelled", number)
            return
        state, reason = ENDINGS[outcome.kind]
        values: list[float] | None = list(outcome.values) or None
        if leader.saw_nan or any(value != value for value in outcome.values):
            state, reason, values = TrialState.PRUNED, "nan", None
        if state is TrialState.PRUNED and reason == "pruned" and trial.last_step is not None:
            values = [trial.intermediate_values[trial.last_step]]  # as Optuna's own tell does
        after_trial(study, trial, state, values)
        if not attempts.settle(database, taken.token, state.name, values, reason, outcome.error):
            self._tell("cancelled", number)
            return
        self._tell(
            "settled",
            number,
            state=state.name,
            reason=reason,
            value=values[0] if values else None,
            steps=len(trial.intermediate_values),
            duration_s=time.monotonic() - started,
            error=outcome.error,
            log_path=str(Path(taken.log_path, f"rank{outcome.rank}.log")),
        )
        if outcome.kind == "refused":
            raise ObjectiveError(f"trial {number} of {study.study_name!r}: {outcome.error}")

    # -- a member's part -----------------------------------------------------------------------------------------

    def lend(self, leader: Any, job: dict[str, Any]) -> None:
        """Run one rank of a leader's trial in this Worker's nursery; every question goes to the leader."""
        token, rank = job["token"], job["rank"]
        trainer = self._nursery.launch()
        self._lent = (token, trainer)
        if self._halted == token:  # the leader gave up while the trainer was being forked
            trainer.stop()
        try:
            outcome = trainer.serve(
                {**job, **self._machine(token)},
                lambda message: ray.get(leader.answer.remote(token, rank, message)),  # type: ignore[no-any-return]
            )
            # The trainer lives on until the leader knows, or its peers' broken connections would be the first news.
            ray.get(leader.rank_ended.remote(token, rank, outcome))
        finally:
            self._lent = None
            trainer.release()
            trainer.bury()

    # -- calls of other Workers (group "gang") -------------------------------------------------------------------

    @ray.method(concurrency_group="gang")
    def answer(self, token: str, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answer a rank of the trial that this Worker leads; None when it is over."""
        gang = self._gang
        return gang.answer(rank, message) if gang is not None and gang.token == token else None

    @ray.method(concurrency_group="gang")
    def rank_ended(self, token: str, rank: int, outcome: Outcome) -> None:
        """Hear from a member how its rank ended."""
        gang = self._gang
        if gang is not None and gang.token == token:
            gang.rank_ended(rank, outcome)

    # -- calls of the pool and of leaders (group "control") ------------------------------------------------------

    @ray.method(concurrency_group="control")
    def halt(self, token: str) -> None:
        """End the rank that this member runs for a leader."""
        self._halted = token
        lent = self._lent
        if lent is not None and lent[0] == token:
            lent[1].stop()

    @ray.method(concurrency_group="control")
    def drain(self) -> None:
        """Take no more trials; the one that runs is finished."""
        self._draining.set()

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        """Take no more trials, and give the one that runs back to the study."""
        self._halting.set()
        self._draining.set()
        gang = self._gang
        if gang is not None:
            gang.stop()

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """What the Worker does now, and what happened since the last call."""
        running, events = self._running, []
        while self._events:
            events.append(self._events.popleft())
        status: dict[str, Any] = {"worker": self._config.name, "events": events, "cold": self._nursery.cold}
        if running is not None:
            number, since, leader = running
            step, value = leader.last_report or (None, None)
            status |= {"trial": number, "step": step, "value": value, "running_s": time.monotonic() - since}
        return status

    def _tell(self, kind: str, number: int, **detail: Any) -> None:
        self._events.append({"event": kind, "trial": number, "worker": self._config.name, **detail})

    def _take_gpu(self) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not visible:
            raise PoolError("Ray gave this Worker no GPU although it asked for one: see `ray status`")
        found = gpus.visible_gpus()
        if found:
            self._lock = gpus.hold(found[0].uuid)
        return found[0].uuid if found else visible
