"""The Ray actor pinned to one GPU: takes a trial, runs it, settles it, and again.

A Worker either leads (it owns the database session of its trials) or is a member that lends its GPU to a leader.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import IO, Any

import ray
from sqlalchemy.exc import NoResultFound

from orchestrator import gpu as gpus
from orchestrator import objective as objective_code
from orchestrator import process
from orchestrator.errors import ObjectiveError, PoolError
from orchestrator.gang import Gang
from orchestrator.launcher import Nursery, Outcome, Trainer
from orchestrator.leader import TrialLeader
from orchestrator.session import Machine, StudySession
from storage.attempts import NotTaken, Owner
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
        self._running: tuple[TrialLeader, float] | None = None

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
        config = self._config
        session = StudySession(url, config.study, config.log_root, config.checkpoint_root)
        self._nursery.wait()
        try:
            return self._loop(session)
        except (KeyError, NoResultFound, StudyNotFound):  # the first two are Optuna's storage, of a row that is gone
            if session.exists():
                raise
            raise StudyNotFound(f"study {config.study!r} was deleted while the pool ran") from None
        finally:
            session.close()

    def _loop(self, session: StudySession) -> str:
        owner = Owner(self._config.name, self._host, os.getpid(), process.identity() or "", self._gpu_ids())
        while not self._draining.is_set():
            leader = session.take(owner)
            if leader is NotTaken.BUSY:
                self._draining.wait(BUSY_POLL_S)
            elif isinstance(leader, NotTaken):
                return leader.name.lower()
            else:
                started = time.monotonic()
                outcome = self._run(session, leader)
                event = session.settle(leader, outcome)
                self._events.append({**event, "worker": self._config.name, "duration_s": time.monotonic() - started})
                if outcome.kind == "refused":
                    raise ObjectiveError(f"trial {leader.taken.number} of {session.name!r}: {outcome.error}")
        return "halted" if self._halting.is_set() else "drained"

    def _run(self, session: StudySession, leader: TrialLeader) -> Outcome:
        """Train a trial on all ranks of the gang."""
        config = self._config
        job = session.job(leader, config.objective, config.folder)
        job |= {"world_size": 1 + len(self._members), **self._machine().job(leader.taken.token)}
        self._gang = Gang(leader, job, self._members)
        self._running = (leader, time.monotonic())
        if self._halting.is_set():  # told so before there was a gang to stop
            self._gang.stop()
        try:
            return self._gang.run(self._nursery)
        finally:
            self._gang = self._running = None

    def _machine(self) -> Machine:
        gpu = ",".join(self._gpu_ids()) if self._config.gpu else None
        return Machine(self._host, gpu, self._config.num_cpus, self._master_host)

    def _gpu_ids(self) -> tuple[str, ...]:
        return tuple(str(gpu) for gpu in ray.get_gpu_ids())

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
                {**job, **self._machine().job(token), "master_host": job["master_host"]},
                lambda message: ray.get(leader.answer.remote(token, rank, message)),
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
            leader, since = running
            step, value = leader.last_report or (None, None)
            status |= {"trial": leader.taken.number, "step": step, "value": value}
            status["running_s"] = time.monotonic() - since
        return status

    def _take_gpu(self) -> str:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if not visible:
            raise PoolError("Ray gave this Worker no GPU although it asked for one: see `ray status`")
        found = gpus.visible_gpus()
        if found:
            self._lock = gpus.hold(found[0].uuid)
        return found[0].uuid if found else visible
