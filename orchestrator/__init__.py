"""Hyperparameter studies on GPU machines, the Optuna way.

From Python, the same three things the command line does::

    import orchestrator

    orchestrator.create_study("digits", objective="objectives.digits:objective", direction="maximize", n_trials=20)
    orchestrator.run("digits", cpu=2)
    study = orchestrator.load_study("digits")  # a normal optuna.Study, with the stored sampler and pruner
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.api import create_study, load_study, run

__all__ = ["create_study", "load_study", "run"]


def __getattr__(name: str) -> Any:
    # Imported on first use: `orch --help` and the trainers should not pay for optuna and SQLAlchemy.
    if name in __all__:
        from orchestrator import api

        return getattr(api, name)
    raise AttributeError(f"module 'orchestrator' has no attribute {name!r}")
