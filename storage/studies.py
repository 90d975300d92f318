"""The definitions of studies: kept whole beside Optuna's rows, written once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from psycopg2.extras import Json

from storage.database import Database, Row, Transaction
from storage.errors import StorageError, StudyNotFound
from storage.queries import load

SQL = load("studies")
FINISHED = ("COMPLETE", "PRUNED", "FAIL")


@dataclass(frozen=True)
class StudyRecord:
    """A study as the database holds it; `spec` is None for an Optuna study without a definition of ours."""

    study_id: int
    name: str
    uid: str | None  # names the study's files; study_id is the same in another database
    directions: tuple[str, ...]  # "MINIMIZE" or "MAXIMIZE", one per objective
    spec: dict[str, Any] | None
    facts: dict[str, Any] | None
    desired: str | None
    n_trials: int | None
    n_history: int | None
    created_at: datetime | None
    counts: dict[str, int]  # trials by state, only the states that occur


def create(
    database: Database,
    name: str,
    directions: Sequence[str],
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
    n_trials: int | None,
) -> StudyRecord | None:
    """Create study and definition in one transaction; returns None when the name is taken, and changes nothing."""
    with database.transaction() as tx:
        row = tx.one(SQL["insert_study"], {"name": name})
        if row is None:
            return None
        for objective, direction in enumerate(directions):
            tx.run(SQL["insert_direction"], {"direction": direction, "objective": objective, **row})
        _define(tx, row["study_id"], spec, facts, n_trials, 0)
        return _find(tx, name)


def adopt(
    database: Database,
    name: str,
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
    n_trials: int | None,
    *,
    count_existing: bool,
) -> StudyRecord:
    """Give a definition to an Optuna study that has none.

    Its trials that are finished now are history and stay outside the budget, unless `count_existing`.

    Raises:
        StudyNotFound: there is no such study.
        StorageError: it has a definition already.
    """
    with database.transaction() as tx:
        study = _find(tx, name)
        if study is None:
            raise StudyNotFound(_no_such_study(tx, name))
        n_history = 0 if count_existing else sum(study.counts.get(state, 0) for state in FINISHED)
        if not _define(tx, study.study_id, spec, facts, n_trials, n_history):
            raise StorageError(f"study {name!r} has a definition already: see `orch study show {name}`")
        adopted = _find(tx, name)
    assert adopted is not None
    return adopted


def find(database: Database, name: str) -> StudyRecord | None:
    """One study by its name, or None."""
    with database.transaction() as tx:
        return _find(tx, name)


def get(database: Database, name: str) -> StudyRecord:
    """One study by its name.

    Raises:
        StudyNotFound: there is none; the message names the nearest one.
    """
    with database.transaction() as tx:
        study = _find(tx, name)
        if study is None:
            raise StudyNotFound(_no_such_study(tx, name))
        return study


def list_all(database: Database) -> list[StudyRecord]:
    """Every study, in the order they were created."""
    with database.transaction() as tx:
        return [_record({"facts": None, **row}) for row in tx.all(SQL["list"])]


def counts(database: Database, study_id: int) -> dict[str, int]:
    """Trials of a study by state."""
    with database.transaction() as tx:
        return _counts(tx, study_id)


def best_trial(database: Database, study: StudyRecord) -> tuple[int, float] | None:
    """Number and value of the best COMPLETE trial; None without one, and for a study with several objectives."""
    if len(study.directions) != 1:
        return None
    sign = 1 if study.directions[0] == "MINIMIZE" else -1
    with database.transaction() as tx:
        row = tx.one(SQL["best_trial"], {"study_id": study.study_id, "sign": sign})
    return None if row is None else (row["number"], row["value"])


def accept_objective(database: Database, study_id: int, facts: Mapping[str, Any]) -> None:
    """Record another version of the objective as the study's.

    Raises:
        StudyNotFound: the study was deleted.
    """
    with database.transaction() as tx:
        if tx.one(SQL["accept_objective"], {"study_id": study_id, "facts": Json(dict(facts))}) is None:
            raise StudyNotFound("the study was deleted")


def set_desired(database: Database, study_id: int, desired: str) -> None:
    """Say what workers are to do with the study: ``active``, ``paused`` or ``stopped``.

    Raises:
        StudyNotFound: the study was deleted, or has no definition.
    """
    with database.transaction() as tx:
        if tx.one(SQL["set_desired"], {"study_id": study_id, "desired": desired}) is None:
            raise StudyNotFound("the study was deleted, or has no definition of orch's")


def delete(database: Database, study_id: int) -> None:
    """Delete a study with everything that belongs to it, in one transaction; nothing happens when it is gone."""
    with database.transaction() as tx:
        # The row locks keep running workers from adding rows between the deletes: they find the trials gone instead.
        tx.run(SQL["lock_study"], {"study_id": study_id})
        # Attempts before trials, in the order in which a Worker that settles locks them.
        tx.run(SQL["lock_attempts"], {"study_id": study_id})
        tx.run(SQL["lock_trials"], {"study_id": study_id})
        tx.run(SQL["delete"], {"study_id": study_id})


def _define(
    tx: Transaction,
    study_id: int,
    spec: Mapping[str, Any],
    facts: Mapping[str, Any],
    n_trials: int | None,
    n_history: int,
) -> bool:
    row = tx.one(
        SQL["insert_definition"],
        {
            "study_id": study_id,
            "spec": Json(dict(spec)),
            "facts": Json(dict(facts)),
            "n_trials": n_trials,
            "n_history": n_history,
        },
    )
    return row is not None


def _find(tx: Transaction, name: str) -> StudyRecord | None:
    row = tx.one(SQL["find"], {"name": name})
    return None if row is None else _record({**row, "counts": _counts(tx, row["study_id"])})


def _counts(tx: Transaction, study_id: int) -> dict[str, int]:
    return {row["state"]: row["n"] for row in tx.all(SQL["counts"], {"study_id": study_id})}


def _record(row: Row) -> StudyRecord:
    return StudyRecord(**{**row, "directions": tuple(row["directions"] or ())})


def _no_such_study(tx: Transaction, name: str) -> str:
    names = [row["study_name"] for row in tx.all(SQL["names"])]
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else "`orch study list` shows those there are"
    return f"there is no study {name[:80]!r}: {hint}"
