"""What the leader of a trial answers to its ranks: parameters, values, verdicts, attributes.

A value is decided once and given to whichever rank asks; the k-th verdict of any rank is rank 0's k-th. Sampling and
pruning are Optuna's own, in the one process that holds the database.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import optuna
from optuna.distributions import distribution_to_json, json_to_distribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import DataError, SQLAlchemyError

from orchestrator.spec import MAX_NAME, StudySpec
from orchestrator.wire import Message
from storage import Database, StorageError, attempts, studies
from storage.attempts import Taken


class TrialLeader:
    """Answers the ranks of one running trial; thread-safe, because every rank asks from a thread of its own."""

    def __init__(self, study: optuna.Study, database: Database, spec: StudySpec, taken: Taken) -> None:
        self._database = database
        self._spec = spec
        self.taken = taken
        self._study = study
        self._study._thread_local.cached_all_trials = None
        self._trial = optuna.Trial(study, taken.trial_id)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._threads = {threading.get_ident()}
        self._verdicts: list[bool] = []
        self._last_verdict: bool | None = None
        self._port: int | None = None
        self._ended = False
        self.last_report: tuple[int, float] | None = None
        self.diverged = False  # it reported NaN or an infinity

    @property
    def frozen(self) -> FrozenTrial:
        """The trial as this process has seen it: parameters and reports so far."""
        return self._trial._cached_frozen_trial

    def job(self) -> dict[str, Any]:
        """What a trainer must know of the trial itself."""
        trial = self.frozen
        params = {
            name: [distribution_to_json(distribution), distribution.to_internal_repr(trial.params[name])]
            for name, distribution in trial.distributions.items()
        }
        start = trial.datetime_start
        return {
            "study_name": self._study.study_name,
            "directions": [direction.name for direction in self._study.directions],
            "number": trial.number,
            "params": params,
            "user_attrs": trial.user_attrs,
            "datetime_start": None if start is None else start.isoformat(),
        }

    def answer(self, rank: int, message: Message) -> Message | None:
        """Answer one question of a rank; None when the trial is not ours any more and the rank must end.

        Raises:
            StorageError, sqlalchemy.exc.SQLAlchemyError: the database is away.
            KeyError: the trial, and so the study, was deleted.
        """
        operation = getattr(self, f"_op_{message['op']}", None)
        if operation is None:
            return {"error": "Refused", "message": f"the trial cannot {message['op']!r}"}
        arguments = {key: value for key, value in message.items() if key != "op"}
        for name in (message.get("name", ""), message.get("key", "")):
            if not isinstance(name, str):
                return {"error": "TypeError", "message": f"a name is a string, not {name!r:.40}"}
            if len(name) > MAX_NAME or storable(name) != name:
                said = f"the database holds names of {MAX_NAME} characters without NUL and surrogates, not {name!r:.60}"
                return {"error": "ValueError", "message": said}
        try:
            with self._lock:
                return None if self._ended else {"ok": operation(rank, **arguments)}
        except UpdateFinishedTrialError:
            return None  # ended from outside: by the dashboard, or by another script
        except _Refusal as refusal:
            return {"error": refusal.error, "message": str(refusal)}
        except (StorageError, SQLAlchemyError, StorageInternalError, KeyError) as error:
            if isinstance(error.__cause__, DataError):
                return {"error": "ValueError", "message": f"the database cannot hold it: {error.__cause__.orig}"}
            raise
        except Exception as error:
            # What Optuna's sampler or pruner makes of the objective's arguments (an infinite range) is the trial's.
            return {"error": "ValueError", "message": f"{message['op']}: {type(error).__name__}: {error}"}

    def rank_0_ended(self, pruned: bool) -> None:
        """Answer verdicts that rank 0 will not ask for any more: the others may ask once more in an uneven epoch."""
        with self._changed:
            self._last_verdict = pruned
            self._changed.notify_all()

    def end(self) -> None:
        """Let go of the ranks that wait for a verdict or for the rendezvous: none will come."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # -- one method per question; the lock is held ---------------------------------------------------------------

    def _op_suggest(self, rank: int, name: str, distribution: str) -> float:
        if threading.get_ident() not in self._threads:
            # Optuna caches the list of trials per thread and clears it only in ask(): a thread that led an earlier
            # trial would sample from the list of that time.
            self._threads.add(threading.get_ident())
            self._study._thread_local.cached_all_trials = None
        wanted = json_to_distribution(distribution)
        try:
            return float(wanted.to_internal_repr(self._trial._suggest(name, wanted)))
        except ValueError as error:
            if name in self._trial._fixed_params:
                raise _Refusal(f"parameter {name!r}, as it was enqueued: {error}", "ValueError") from None
            # The same for every trial: choices that changed, a distribution of another kind, a point off the grid.
            raise _Refusal(f"parameter {name!r}: {error}") from None

    def _op_report(self, rank: int, value: float, step: int) -> None:
        if step in self.frozen.intermediate_values:
            return  # Optuna keeps the first; a trial that resumed repeats its checkpoint's step
        self.last_report = (step, value)
        if not math.isfinite(value):
            # Not on the row: it would move other trials' rungs and medians, and TPE would rank this one by its step.
            self.diverged = True
            return
        try:
            self._trial.report(value, step)
        except NotImplementedError as error:
            raise _Refusal(str(error)) from None

    def _op_should_prune(self, rank: int, call: int) -> bool:
        if rank == 0:
            self._verdicts.append(self._verdict())
            self._changed.notify_all()
        while len(self._verdicts) <= call:
            if self._last_verdict is not None:
                return self._last_verdict  # rank 0 ended without asking as often
            if self._ended:
                raise UpdateFinishedTrialError
            self._changed.wait()
        return self._verdicts[call]

    def _verdict(self) -> bool:
        if self.diverged:
            return True  # it does not recover, and pruners would only look at it on a rung
        last = self.frozen.last_step
        if last is None or (self._spec.max_steps is not None and last >= self._spec.max_steps):
            return False  # it has used its whole budget: complete, never pruned by its last report
        try:
            return bool(self._trial.should_prune())  # some pruners answer with numpy.bool
        except NotImplementedError as error:
            raise _Refusal(str(error)) from None

    def _op_set_user_attr(self, rank: int, key: str, value: Any) -> None:
        self._trial.set_user_attr(key, value)

    def _op_set_constraint(self, rank: int, key: str, value: float) -> None:
        self._trial.set_constraint(key, value)

    def _op_checkpoint(self, rank: int, step: int, path: str) -> None:
        if not attempts.record_checkpoint(self._database, self.taken.token, step, path):
            raise UpdateFinishedTrialError

    def _op_rendezvous_open(self, rank: int, port: int) -> None:
        self._port = port
        self._changed.notify_all()

    def _op_rendezvous(self, rank: int) -> int:
        while self._port is None:
            if self._ended:
                raise UpdateFinishedTrialError
            self._changed.wait()
        return self._port

    def _op_study(self, rank: int, what: str) -> Any:
        if what == "user_attrs":
            return self._study.user_attrs
        try:
            return {"best_value": lambda: self._study.best_value, "best_params": lambda: self._study.best_params}[
                what
            ]()
        except (ValueError, RuntimeError) as error:  # no trial is complete; several objectives
            raise _Refusal(str(error), "ValueError") from None

    def _op_study_set_user_attr(self, rank: int, key: str, value: Any) -> None:
        self._study.set_user_attr(key, value)

    def _op_study_stop(self, rank: int) -> None:
        studies.set_desired(self._database, self._study._study_id, "stopped")


def storable(text: str) -> str:
    """A text as PostgreSQL can hold it: NUL and lone surrogates, which an error message may quote, are spelled out."""
    return text.replace("\0", "\\0").encode("utf-8", "backslashreplace").decode()


class _Refusal(Exception):
    """What the objective asked cannot be done; it is told so by an exception of its own."""

    def __init__(self, message: str, error: str = "Refused") -> None:
        super().__init__(message)
        self.error = error


def after_trial(study: optuna.Study, trial: FrozenTrial, state: TrialState, values: list[float] | None) -> None:
    """Let the sampler finish a trial, as `Study.tell` does before it writes the state.

    Grid and brute force call `study.stop()` here when their space is exhausted, which Optuna refuses outside
    `optimize`: the flag that it checks is set for the call.
    """
    study._thread_local.cached_all_trials = None
    study._thread_local.in_optimize_loop = True
    try:
        study.sampler.after_trial(optuna.pruners._filter_study(study, trial), trial, state, values)
    finally:
        study._thread_local.in_optimize_loop = False
