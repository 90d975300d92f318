"""Who runs which trial: take, settle, give back. The open attempt of a trial is its lease.

Each verb is one transaction and idempotent under its token, so that it can be repeated after a lost answer.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

from storage.database import Database, Transaction
from storage.errors import StudyNotFound
from storage.queries import load

SQL = load("attempts")


@dataclass(frozen=True)
class Owner:
    """Who takes a trial."""

    worker: str
    host: str
    pid: int
    process: str  # boot, pid and start time of the Worker
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Taken:
    """A trial that now belongs to the owner of `token`; with the checkpoint to go on from, if there is one."""

    token: str
    trial_id: int
    number: int
    log_path: str
    checkpoint_step: int | None
    checkpoint_path: str | None


class NotTaken(Enum):
    """Why `take` gave no trial."""

    DONE = "the budget is spent"
    BUSY = "the rest of the budget is being trained by others"
    PAUSED = "the study is paused"
    STOPPED = "the study is stopped"


@dataclass(frozen=True)
class Attempt:
    """One try at running a trial, as it is kept for people."""

    number: int
    token: str
    worker: str
    host: str
    pid: int
    gpus: list[str]
    started_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    error: str | None
    log_path: str | None
    checkpoint_step: int | None
    checkpoint_path: str | None


def take(
    database: Database, study_id: int, owner: Owner, token: uuid.UUID, log_path: Callable[[int], str]
) -> Taken | NotTaken:
    """Take the next trial of a study: one given back, else an enqueued one, else a new one, within the budget.

    The row lock on the study makes the budget exact over any number of workers. `log_path` says where the rank logs
    of a trial number go.

    Raises:
        StudyNotFound: the study, or its definition, is gone.
    """
    with database.transaction() as tx:
        key: dict[str, Any] = {"study_id": study_id, "token": str(token)}
        control = tx.one(SQL["control"], key) if tx.one(SQL["lock_study"], key) else None
        if control is None:
            raise StudyNotFound("the study was deleted")
        again = tx.one(SQL["find_attempt"], key)
        if again is not None:
            return _taken(tx, key["token"], again, log_path)
        trial = _next_trial(tx, key, control)
        if isinstance(trial, NotTaken):
            return trial
        lease = {**vars(owner), "gpus": list(owner.gpus), **key, **trial, "log_path": log_path(trial["number"])}
        tx.run(SQL["open_attempt"], lease)
        return _taken(tx, key["token"], trial, log_path)


def _taken(tx: Transaction, token: str, trial: dict[str, Any], log_path: Callable[[int], str]) -> Taken:
    last = tx.one(SQL["last_checkpoint"], trial) or {"checkpoint_step": None, "checkpoint_path": None}
    return Taken(token, trial["trial_id"], trial["number"], log_path(trial["number"]), **last)


def _allowed(control: dict[str, Any]) -> NotTaken | None:
    """Why no new trial may be started; None when one may."""
    if control["desired"] == "stopped":
        return NotTaken.STOPPED
    if control["desired"] == "paused":
        return NotTaken.PAUSED
    spoken_for = control["finished"] - control["n_history"] + control["under_way"]
    if control["n_trials"] is None or spoken_for < control["n_trials"]:
        return None
    return NotTaken.BUSY if control["under_way"] else NotTaken.DONE


def _next_trial(tx: Transaction, key: dict[str, Any], control: dict[str, Any]) -> dict[str, Any] | NotTaken:
    """A RUNNING row for the caller, or why there is none; the study row is locked."""
    allowed = _allowed(control)
    if allowed in (NotTaken.STOPPED, NotTaken.PAUSED):
        return allowed
    waiting = tx.one(SQL["waiting"], key)
    if waiting is not None and (waiting["given_back"] or allowed is None):
        tx.run(SQL["start_waiting"], waiting)
        checkpoint = tx.one(SQL["last_checkpoint"], waiting)
        if checkpoint is not None:
            tx.run(SQL["put_back_values"], {**waiting, "step": checkpoint["checkpoint_step"]})
        return waiting
    if allowed is not None:
        return allowed
    created = tx.one(SQL["new_trial"], key)
    assert created is not None
    return created


def outlook(database: Database, study_id: int) -> NotTaken | None:
    """What `take` would answer now, without taking anything; None when it would give a trial.

    Raises:
        StudyNotFound: the study, or its definition, is gone.
    """
    with database.transaction() as tx:
        key = {"study_id": study_id}
        control = tx.one(SQL["control"], key)
        if control is None:
            raise StudyNotFound("the study was deleted")
        allowed = _allowed(control)
        waiting = tx.one(SQL["waiting"], key) if allowed in (NotTaken.BUSY, NotTaken.DONE) else None
        return None if waiting is not None and waiting["given_back"] else allowed


def settle(
    database: Database, token: str, state: str, values: Sequence[float] | None, reason: str, error: str | None = None
) -> bool:
    """End a trial as COMPLETE, PRUNED or FAIL, and close its attempt.

    Returns False, and leaves the trial alone, when the attempt is not the caller's any more or when somebody else
    (the dashboard) ended the trial: the attempt is then closed as `cancelled`.
    """
    with database.transaction() as tx:
        locked = tx.one(SQL["lock_attempt"], {"token": token})
        if locked is None:
            return False
        finished = tx.one(SQL["finish_trial"], {**locked, "state": state}) is not None
        for objective, value in enumerate(values or ()) if finished else ():
            kind = "FINITE" if math.isfinite(value) else ("INF_POS" if value > 0 else "INF_NEG")
            stored = value if math.isfinite(value) else None
            tx.run(SQL["set_value"], {**locked, "objective": objective, "value": stored, "value_type": kind})
        if finished and state == "FAIL":
            # A failed trial does not judge others: Optuna's pruners would go on comparing with its rung marks.
            tx.run(SQL["take_off_rung_marks"], locked)
        if finished and reason == "nan":
            # TPE ranks pruned trials by their last step: one that ended as NaN must not look better for it.
            tx.run(SQL["take_off_values"], {**locked, "token": token})
        tx.run(SQL["close_attempt"], {"token": token, "reason": reason if finished else "cancelled", "error": error})
        return finished


def give_back(database: Database, token: str, reason: str, error: str | None = None) -> bool:
    """Put a trial back to WAITING on the same row, and close its attempt.

    Its reported values move from the trial's row to the attempt, so that any worker, also a plain Optuna one, starts
    it clean; `take` puts back those up to the checkpoint. Returns False when the attempt is not the caller's any more.
    """
    with database.transaction() as tx:
        locked = tx.one(SQL["lock_attempt"], {"token": token})
        if locked is None:
            return False
        key = {**locked, "token": token}
        if tx.run(SQL["wait_again"], key):
            tx.run(SQL["take_off_values"], key)
            tx.run(SQL["take_off_rung_marks"], key)
        tx.run(SQL["close_attempt"], {"token": token, "reason": reason, "error": error})
        return True


def record_checkpoint(database: Database, token: str, step: int, path: str) -> bool:
    """Record that the trial can go on from `step`; False when the attempt is not the caller's any more."""
    with database.transaction() as tx:
        return tx.one(SQL["record_checkpoint"], {"token": token, "step": step, "path": path}) is not None


@dataclass(frozen=True)
class OpenAttempt:
    """A lease that is held, and by which process."""

    token: str
    worker: str
    host: str
    process: str
    number: int


def open_of_study(database: Database, study_id: int) -> list[OpenAttempt]:
    """The open attempts of a study: who trains what."""
    with database.transaction() as tx:
        return [OpenAttempt(**row) for row in tx.all(SQL["open_of_study"], {"study_id": study_id})]


def of_study(database: Database, study_id: int, number: int | None = None) -> list[Attempt]:
    """Every attempt of a study, or of one of its trials, oldest first."""
    with database.transaction() as tx:
        return [Attempt(**row) for row in tx.all(SQL["of_study"], {"study_id": study_id, "number": number})]
