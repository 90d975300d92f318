"""Trials as people and programs read them: Optuna's attribute names, and what orch knows beside them."""

from __future__ import annotations

import warnings
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from storage import StudyNotFound, attempts, open_database, open_storage, studies
from storage.attempts import Attempt

GONE = (TrialState.PRUNED, TrialState.FAIL)


def trials_of(url: str, name: str, states: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Every trial of a study, in order, or those in some states.

    Raises:
        StudyNotFound: there is no such study.
    """
    record, tried = _attempts(url, name)
    wanted = tuple(TrialState[state] for state in states) or None
    frozen = open_storage(url).get_all_trials(record.study_id, deepcopy=False, states=wanted)
    return [_as_dict(trial, tried.get(trial.number, [])) for trial in frozen]


def trial_of(url: str, name: str, number: int) -> dict[str, Any]:
    """One trial with its curve and attempts.

    Raises:
        StudyNotFound: there is no such study or trial.
    """
    record, tried = _attempts(url, name, number)
    storage = open_storage(url)
    try:
        trial = storage.get_trial(storage.get_trial_id_from_study_id_trial_number(record.study_id, number))
    except KeyError:
        n_trials = sum(record.counts.values())
        raise StudyNotFound(f"study {name!r} has no trial {number}: it has {n_trials}, numbered from 0") from None
    mine = tried.get(number, [])
    return {
        **_as_dict(trial, mine),
        "intermediate_values": {str(step): value for step, value in sorted(trial.intermediate_values.items())},
        "system_attrs": trial.system_attrs,
        "attempts": [vars(attempt) for attempt in mine],
    }


def best_trials(url: str, name: str) -> list[dict[str, Any]]:
    """The best trial of a study, or its Pareto front; empty while no trial is complete.

    Raises:
        StudyNotFound: there is no such study.
    """
    record, tried = _attempts(url, name)
    if len(record.directions) == 1:
        database = open_database(url)
        best = studies.best_trial(database, record)
        database.close()
        return [] if best is None else [trial_of(url, name, best[0])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        front = optuna.load_study(study_name=name, storage=open_storage(url)).best_trials
    return [_as_dict(trial, tried.get(trial.number, [])) for trial in front]


def _attempts(url: str, name: str, number: int | None = None) -> tuple[studies.StudyRecord, dict[int, list[Attempt]]]:
    database = open_database(url)
    try:
        record = studies.get(database, name)
        by_number: dict[int, list[Attempt]] = {}
        for attempt in attempts.of_study(database, record.study_id, number):
            by_number.setdefault(attempt.number, []).append(attempt)
    finally:
        database.close()
    return record, by_number


def _as_dict(trial: FrozenTrial, tried: list[Attempt]) -> dict[str, Any]:
    last = tried[-1] if tried else None
    duration = trial.duration
    saved = [attempt for attempt in tried if attempt.checkpoint_path]
    return {
        "number": trial.number,
        "state": trial.state.name,
        "values": trial.values,
        "value": trial.values[0] if trial.values and len(trial.values) == 1 else None,
        "params": trial.params,
        "user_attrs": trial.user_attrs,
        "last_step": trial.last_step,
        "datetime_start": trial.datetime_start,
        "datetime_complete": trial.datetime_complete,
        "duration_s": None if duration is None else duration.total_seconds(),
        "worker": last.worker if last else None,
        "end_reason": last.end_reason if last else None,
        # Those of pruned and failed trials are removed: nobody goes on from them.
        "checkpoint": saved[-1].checkpoint_path if saved and trial.state not in GONE else None,
    }
