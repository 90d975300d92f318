"""The driver of a pool: places Workers, respawns them, drains them, shows progress. It holds no state that matters."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import Any

import ray

from orchestrator import process
from orchestrator.cluster import Cluster, Crew, Wanted, connect, get, last_line, place
from orchestrator.errors import PoolError
from orchestrator.files import checkpoint_root, log_root
from orchestrator.objective import Source
from orchestrator.progress import Progress, Standing
from orchestrator.spec import StudySpec
from orchestrator.worker import WorkerConfig
from storage import Database, OrchError, attempts
from storage.attempts import NotTaken
from storage.studies import StudyRecord
from storage.url import is_loopback

POLL_S = 0.2
COUNTS_S = 1.0
STOP_GRACE_S = 10.0  # to give running trials back, when the pool is stopped or ends by an error
MAX_RESPAWNS = 3  # of one gang, in a row, without a settled trial between


@dataclass(frozen=True)
class PoolPlan:
    """All that a pool needs to know before it starts."""

    url: str
    study: StudyRecord
    spec: StudySpec
    objective: str  # resolved on this machine
    folder: str
    source: Source
    wanted: Wanted
    max_failures: int = 8


@dataclass(frozen=True)
class PoolResult:
    """How a pool ended: done, paused, stopped, or interrupted by a signal."""

    reason: str
    standing: Standing
    signal: int | None = None


def run_pool(plan: PoolPlan, database: Database) -> PoolResult:
    """Run a pool until its study is done, or until it is told to leave.

    Raises:
        PoolError: it cannot start, or trial after trial failed.
        StudyNotFound: the study was deleted while it ran.
        ObjectiveError: the objective does something that no trial of this study can survive.
    """
    reclaim(database, plan.study.study_id)
    standing = Standing(plan.study.name, plan.study.n_trials)
    nothing_to_do = attempts.outlook(database, plan.study.study_id)
    if nothing_to_do not in (None, NotTaken.BUSY):
        standing.count(database, plan.study)
        return PoolResult(nothing_to_do.name.lower(), standing)
    with Progress(standing) as progress, _Signals() as signals:
        progress.say("starting Ray ..." if plan.wanted.address is None else f"joining Ray at {plan.wanted.address} ...")
        with connect(plan.wanted) as cluster:
            if signals.seen:  # while Ray started
                return PoolResult("drained", standing, signals.seen[-1])
            signals.listen()  # Ray put a handler of its own in the place of ours
            pool = _Pool(plan, database, cluster, progress, signals)
            try:
                reason = pool.run()
            finally:
                pool.close()
    return PoolResult(reason, standing, signals.seen[-1] if signals.seen and reason in ("drained", "halted") else None)


def reclaim(database: Database, study_id: int) -> list[int]:
    """Give back the trials of Workers of this machine that are dead: an earlier pool was killed. Returns numbers."""
    reclaimed = []
    for attempt in attempts.open_of_study(database, study_id):
        here = attempt.host == socket.gethostname()
        if here and not process.is_alive(attempt.process) and attempts.give_back(database, attempt.token, "lost"):
            reclaimed.append(attempt.number)
    return reclaimed


class _Signals:
    """Collects SIGINT, SIGTERM and SIGHUP instead of dying of them."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.seen: list[int] = []

    def listen(self) -> None:
        """Take over the signals."""
        for number, before in self._before:
            if before is signal.SIG_IGN:  # nohup
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, lambda number, frame: self.seen.append(number))

    def __enter__(self) -> _Signals:
        self._before = [(number, signal.getsignal(number)) for number in self.NUMBERS]
        self.listen()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before:
            signal.signal(number, handler)


class _Pool:
    """The gangs of one pool and what they do."""

    def __init__(
        self, plan: PoolPlan, database: Database, cluster: Cluster, progress: Progress, signals: _Signals
    ) -> None:
        self._plan, self._database, self._cluster = plan, database, cluster
        self._progress, self._signals = progress, signals
        self._crews: dict[Any, Crew] = {}  # by the reference of the leader's work()
        self._respawns: dict[str, int] = {}
        self._failures = 0
        self._first_failure: str | None = None
        self._heeded = 0
        self._told_cold = False
        self._stop_by: float | None = None
        self._counted_at = 0.0

    def run(self) -> str:
        """Start every gang, watch until the last has ended; returns why."""
        size = self._plan.spec.gpus_per_trial
        n_gangs, left = divmod(self._cluster.n_workers, size)
        if n_gangs == 0:
            raise PoolError(
                f"a trial of this study takes {size} Workers (gpus_per_trial), the pool has {self._cluster.n_workers}"
            )
        if left:
            self._progress.say(f"{left} of {self._cluster.n_workers} Workers stay idle: a trial takes {size}")
        label = f"{socket.gethostname()}-{os.getpid()}"
        for first in range(0, n_gangs * size, size):
            self._start([f"{label}/{index}" for index in range(first, first + size)])
        self._progress.say(f"{n_gangs * size} Workers are up ({self._device()}), {n_gangs} trials at a time")
        reasons = []
        while self._crews:
            if self._stop_by is not None and time.monotonic() > self._stop_by:
                reasons.append("halted")  # somebody hangs; close() ends it and gives its trial back
                break
            reason = self._watch()
            if reason is not None:
                reasons.append(reason)
        self._count()
        # Some Workers leave because they were drained, others because the study was done by then.
        return "done" if "done" in reasons and "halted" not in reasons else reasons[-1]

    def close(self) -> None:
        """End what is left of the gangs; their trials go back to the study at once."""
        for crew in self._crews.values():
            crew.leader.stop.remote()
        if self._crews:
            ray.wait(list(self._crews), num_returns=len(self._crews), timeout=STOP_GRACE_S)
        for crew in self._crews.values():
            crew.kill()
            self._give_back(crew, "drained", None)

    def _device(self) -> str:
        return "one GPU each" if self._cluster.gpu else f"CPU, {self._cluster.num_cpus} core(s) each"

    def _start(self, names: list[str]) -> None:
        plan = self._plan
        config = WorkerConfig(
            name=names[0],
            study=plan.study.name,
            objective=plan.objective,
            folder=plan.folder,
            sha256=plan.source.sha256,
            gpu=self._cluster.gpu,
            num_cpus=self._cluster.num_cpus,
            checkpoint_root=str(checkpoint_root()),
            log_root=str(log_root()),
        )
        crew = place(self._cluster, config, names)
        elsewhere = {where.host for where in crew.places} - {socket.gethostname()}
        if elsewhere and is_loopback(plan.url):
            crew.kill()
            raise PoolError(
                f"the Worker on {sorted(elsewhere)[0]} cannot reach a database that only this machine can: "
                "`orch db start --listen ADDRESS` opens the private server to other nodes"
            )
        # The URL travels as an argument of this one call: never in argv, runtime_env, names or logs.
        self._crews[crew.leader.work.remote(plan.url)] = crew

    def _watch(self) -> str | None:
        """One turn: heed signals, show progress, take note of one gang that has ended (and why)."""
        self._heed_signals()
        ended, _ = ray.wait(list(self._crews), timeout=POLL_S)
        statuses = self._poll()
        if time.monotonic() - self._counted_at > COUNTS_S:
            self._count()
        self._progress.show(statuses)
        if not ended:
            return None
        crew = self._crews.pop(ended[0])
        try:
            reason: str = get(ended[0])
        except OrchError:
            crew.kill()
            raise
        except ray.exceptions.RayError as error:
            self._replace(crew, error)
            return None
        self._last_words(crew)
        crew.kill()
        return reason

    def _heed_signals(self) -> None:
        """The first signal drains, the second stops."""
        if self._heeded == min(len(self._signals.seen), 2):
            return
        self._heeded = min(len(self._signals.seen), 2)
        if self._heeded == 1:
            self._progress.say("draining: running trials are finished, no new ones taken; once more to stop now")
        else:
            self._progress.say("stopping: running trials go back to the study")
            self._stop_by = time.monotonic() + STOP_GRACE_S
        for crew in self._crews.values():
            (crew.leader.drain if self._heeded == 1 else crew.leader.stop).remote()

    def _poll(self) -> list[dict[str, Any]]:
        """Ask the leaders what they do; a Worker that does not answer shows up as ended soon."""
        asked = [crew.leader.status.remote() for crew in self._crews.values()]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=5.0) if asked else ([], [])
        statuses = []
        for ref in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                statuses.append(ray.get(ref))
        for status in statuses:
            self._note(status)
        return statuses

    def _last_words(self, crew: Crew) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            self._note(ray.get(crew.leader.status.remote(), timeout=5.0))

    def _note(self, status: dict[str, Any]) -> None:
        """Print transitions, and stop the pool when trial after trial fails."""
        if status["cold"] and not self._told_cold:
            self._told_cold = True
            self._progress.say(f"trials start slower, importing the objective each time: {status['cold']}")
        for event in status["events"]:
            self._progress.event(event)
            if event["event"] != "settled":
                continue
            self._respawns.pop(status["worker"], None)
            if event["state"] != "FAIL":
                self._failures = 0
                continue
            self._failures += 1
            if self._failures == 1:
                self._first_failure = f"trial {event['trial']}: {(event['error'] or event['reason']).splitlines()[-1]}"
            if self._failures >= self._plan.max_failures:
                raise PoolError(f"{self._failures} trials failed in a row, the pool stops; first {self._first_failure}")

    def _count(self) -> None:
        self._progress.standing.count(self._database, self._plan.study)
        self._counted_at = time.monotonic()

    def _replace(self, crew: Crew, error: Exception) -> None:
        """A Worker died: give its trial back at once, and start its gang again."""
        crew.kill()
        said = last_line(error)
        self._give_back(crew, "lost", said)
        deaths = self._respawns[crew.names[0]] = self._respawns.get(crew.names[0], 0) + 1
        if deaths > MAX_RESPAWNS:
            raise PoolError(f"Worker {crew.names[0]} died {deaths} times in a row; the last time: {said}")
        self._progress.say(f"Worker {crew.names[0]} died and is started again: {said}")
        self._start(crew.names)

    def _give_back(self, crew: Crew, reason: str, error: str | None) -> None:
        for attempt in attempts.open_of_study(self._database, self._plan.study.study_id):
            if attempt.worker in crew.names:
                attempts.give_back(self._database, attempt.token, reason, error)
