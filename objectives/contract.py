"""What an objective may rely on while it trains: Protocols only, so that reading them needs neither torch nor Ray.

An objective is any function ``objective(trial) -> float``. The ``trial`` has Optuna's Trial API and, beside it, what a
trainer needs. On a trial with several GPUs every rank calls the objective; each sees the same parameters and verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Checkpoint(Protocol):
    """The resumable state of one trial, private to it."""

    def load(self) -> dict[str, Any] | None:
        """Return what was saved last, on the CPU, or None at the first start."""

    def save(self, state: dict[str, Any], step: int, *, best: bool = False) -> None:
        """Keep ``state`` as of finished step ``step`` (counted from 1), atomically; rank 0 writes, other ranks return.

        With ``best`` the state is kept apart as the trial's best so far, too.

        Raises:
            TypeError: ``state`` holds something that ``torch.load(weights_only=True)`` could not read back.
        """


class Trial(Protocol):
    """The part of the trial that the shipped objectives use; all of Optuna's Trial API is there as well."""

    number: int
    params: dict[str, Any]
    settings: dict[str, Any]
    device: str
    rank: int
    world_size: int
    seed: int
    num_cpus: int
    checkpoint: Checkpoint

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Optuna's suggest_float: decided once by the leader, the same on every rank."""

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        """Optuna's suggest_int."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """Optuna's suggest_categorical; choices are None, bool, int, float or str."""

    def report(self, value: float, step: int) -> None:
        """Report the objective's value after finished step ``step`` (from 1); ignored on ranks other than 0."""

    def should_prune(self) -> bool:
        """Whether to stop now: the k-th call on any rank gives rank 0's k-th verdict."""

    def set_user_attr(self, key: str, value: Any) -> None:
        """Attach a JSON value to the trial."""
