"""The Trial an objective sees: Optuna's Trial API on every rank, answered by the leader through the Worker."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)
from optuna.trial import BaseTrial

from orchestrator.wire import Channel, Message

if TYPE_CHECKING:
    from objectives.contract import Checkpoint


class Refused(Exception):
    """The leader could not do what the objective asked: the message says why."""


# What an answer's error becomes in the objective; anything else is a Refused.
ERRORS: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}


class Asks(Protocol):
    """Whoever carries a rank's questions to the leader."""

    def ask(self, op: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer."""


class Leader:
    """The trainer's line to the leader of the trial: one question at a time, each with an answer."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._asked = 0
        self._pid = os.getpid()

    def ask(self, op: str, **arguments: Any) -> Any:
        """Ask, and wait for the answer.

        Raises:
            Refused, ValueError, TypeError, KeyError: what the leader answered.
            RuntimeError: this is a fork of the trial's process, and would take its answers.
            SystemExit: the Worker is gone; there is nobody left to train for.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("only the process that the trial was given to can ask it; a forked one cannot")
        with self._lock:
            self._asked += 1
            question = {"op": op, "id": self._asked, **arguments}
            # A signal handler of the objective's (a timeout) may raise: not in the middle of a line, and an answer that
            # was not waited for must not become that of the next question.
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._channel.send(question)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            while (answer := self._channel.receive()) is not None:
                if answer["id"] == question["id"]:
                    return read_answer(answer)
        raise SystemExit("the Worker is gone")


def read_answer(answer: Message) -> Any:
    """What an answer says, or the exception that it names."""
    if "error" in answer:
        raise ERRORS.get(answer["error"], Refused)(answer["message"])
    return answer["ok"]


class Trial(BaseTrial):
    """Optuna's Trial on any rank, in any order of calls; and what a trainer needs beside it.

    A value is decided once, by the leader, and given to whichever rank asks. Reports of ranks other than 0 are
    ignored; the k-th `should_prune()` of any rank returns rank 0's k-th verdict.
    """

    def __init__(
        self,
        leader: Asks,
        job: dict[str, Any],
        checkpoint: Checkpoint,
        device: Callable[[], str],
    ) -> None:
        self._leader = leader
        self._job = job
        self._device = device
        self.checkpoint = checkpoint
        self.settings: dict[str, Any] = job["settings"]
        self.rank: int = job["rank"]
        self.world_size: int = job["world_size"]
        self.seed: int = job["seed"]
        self.num_cpus: int = job["num_cpus"]
        self._params: dict[str, Any] = {}
        self._distributions: dict[str, BaseDistribution] = {}
        for name, (text, internal) in job["params"].items():
            self._remember(name, json_to_distribution(text), internal)
        self._user_attrs: dict[str, Any] = dict(job["user_attrs"])
        self._constraints: dict[str, float] = {}
        self._verdicts = 0
        self.study = StudyView(leader, job)

    def __repr__(self) -> str:
        return f"Trial(number={self.number}, rank={self.rank}, params={self._params})"

    @property
    def device(self) -> str:
        """Where to train: ``cuda:0`` (the Worker's one GPU) or ``cpu``.

        Raises:
            RuntimeError: the Worker has a GPU, but torch cannot use it; training on the CPU unnoticed would be worse.
        """
        return self._device()

    # -- parameters ---------------------------------------------------------------------------------------------

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Suggest a float: see `optuna.Trial.suggest_float`."""
        return float(self._suggest(name, FloatDistribution(low, high, log=log, step=step)))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Suggest an int: see `optuna.Trial.suggest_int`."""
        return int(self._suggest(name, IntDistribution(low, high, log=log, step=step)))

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Suggest one of the choices: None, bool, int, float or str.

        Raises:
            Refused: a choice is of another type; the database would give it back as something else (optuna#2328).
        """
        for choice in choices:
            if not isinstance(choice, None.__class__ | bool | int | float | str):
                raise Refused(
                    f"parameter {name!r}: the choice {choice!r} is a {type(choice).__name__}; choices can only be "
                    "None, bool, int, float or str: suggest a name, and look the value up in a dict"
                )
        return self._suggest(name, CategoricalDistribution(tuple(choices)))

    def suggest_uniform(self, name: str, low: float, high: float) -> float:
        """Optuna's old name of ``suggest_float(name, low, high)``."""
        return self.suggest_float(name, low, high)

    def suggest_loguniform(self, name: str, low: float, high: float) -> float:
        """Optuna's old name of ``suggest_float(name, low, high, log=True)``."""
        return self.suggest_float(name, low, high, log=True)

    def suggest_discrete_uniform(self, name: str, low: float, high: float, q: float) -> float:
        """Optuna's old name of ``suggest_float(name, low, high, step=q)``."""
        return self.suggest_float(name, low, high, step=q)

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name in self._params:
            optuna.distributions.check_distribution_compatibility(self._distributions[name], distribution)
        else:
            internal = self._leader.ask("suggest", name=name, distribution=distribution_to_json(distribution))
            self._remember(name, distribution, internal)
        return self._params[name]

    def _remember(self, name: str, distribution: BaseDistribution, internal: float) -> None:
        self._distributions[name] = distribution
        self._params[name] = distribution.to_external_repr(internal)

    # -- values and verdicts ------------------------------------------------------------------------------------

    def report(self, value: float, step: int) -> None:
        """Report the objective's value after finished step ``step``; on ranks other than 0 nothing happens.

        Raises:
            TypeError: the value is no float, or the step no integer.
            ValueError: the step is negative or does not fit 32 bits.
        """
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise TypeError(f"report(value=...) takes a float, not {type(value).__name__}") from None
        try:
            whole = int(step)
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"report(step=...) takes an integer, not {type(step).__name__}") from None
        if whole != step:
            raise ValueError(f"report(step={step!r}) takes a whole number")
        if not 0 <= whole < 2**31:
            raise ValueError(f"report(step={step!r}) takes a number from 0 to 2147483647")
        if self.rank == 0:
            self._leader.ask("report", value=number, step=whole)

    def should_prune(self) -> bool:
        """Whether the trial should stop now: the k-th call on any rank gives rank 0's k-th verdict."""
        call, self._verdicts = self._verdicts, self._verdicts + 1
        return bool(self._leader.ask("should_prune", call=call))

    def set_constraint(self, key: str, value: float) -> None:
        """Set a constraint: see `optuna.Trial.set_constraint`; on ranks other than 0 it is only remembered."""
        self._constraints[key] = float(value)
        if self.rank == 0:
            self._leader.ask("set_constraint", key=key, value=float(value))

    # -- facts --------------------------------------------------------------------------------------------------

    def set_user_attr(self, key: str, value: Any) -> None:
        """Attach a JSON value to the trial; on ranks other than 0 it is only remembered.

        Raises:
            TypeError: JSON has no words for the value.
        """
        json.dumps(value)
        if not isinstance(key, str):
            raise TypeError(f"set_user_attr(key=...) takes a string, not {key!r:.40}")
        self._user_attrs[key] = value
        if self.rank == 0:
            self._leader.ask("set_user_attr", key=key, value=value)

    @property
    def number(self) -> int:
        """The trial's number in its study, from 0."""
        return int(self._job["number"])

    @property
    def params(self) -> dict[str, Any]:
        """The parameters suggested so far."""
        return dict(self._params)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The distributions of the parameters suggested so far."""
        return dict(self._distributions)

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The attributes set so far."""
        return dict(self._user_attrs)

    @property
    def constraints(self) -> dict[str, float]:
        """The constraints set so far."""
        return dict(self._constraints)

    @property
    def datetime_start(self) -> datetime | None:
        """When the trial started, in local time, like Optuna's."""
        text = self._job["datetime_start"]
        return None if text is None else datetime.fromisoformat(text)

    @property
    def relative_params(self) -> dict[str, Any]:
        """Optuna's own trials show the sampler's plan here; sampling is the leader's, so nothing can be shown."""
        return {}


class StudyView:
    """What an objective may know of its study, and do to it: the rest of Optuna's Study lives with the leader."""

    def __init__(self, leader: Asks, job: dict[str, Any]) -> None:
        self._leader = leader
        self.study_name: str = job["study_name"]
        self.directions = [optuna.study.StudyDirection[name] for name in job["directions"]]

    @property
    def direction(self) -> optuna.study.StudyDirection:
        """The direction of a study with one objective."""
        if len(self.directions) != 1:
            raise RuntimeError("the study has several objectives: use trial.study.directions")
        return self.directions[0]

    @property
    def user_attrs(self) -> dict[str, Any]:
        """The study's attributes, as they are now."""
        return dict(self._leader.ask("study", what="user_attrs"))

    @property
    def best_value(self) -> float:
        """The best value so far; ValueError while no trial is complete."""
        return float(self._leader.ask("study", what="best_value"))

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters of the best trial so far; ValueError while no trial is complete."""
        return dict(self._leader.ask("study", what="best_params"))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Attach a JSON value to the study."""
        self._leader.ask("study_set_user_attr", key=key, value=value)

    def stop(self) -> None:
        """Take no more trials for this study; those that run are finished."""
        self._leader.ask("study_stop")

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"trial.study.{name} is not available while training: a trial can see study_name, direction(s), "
            "user_attrs, best_value and best_params, and call set_user_attr() and stop()"
        )
