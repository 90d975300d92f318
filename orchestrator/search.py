"""From the spec to Optuna's sampler and pruner: the only place that maps our names to Optuna's."""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import optuna
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler

from orchestrator.errors import SpecError
from orchestrator.spec import Named, StudySpec, nearest

SAMPLERS: dict[str, Callable[..., BaseSampler]] = {
    "tpe": optuna.samplers.TPESampler,
    "random": optuna.samplers.RandomSampler,
    "qmc": optuna.samplers.QMCSampler,
    "grid": optuna.samplers.GridSampler,
    "bruteforce": optuna.samplers.BruteForceSampler,
    "cmaes": optuna.samplers.CmaEsSampler,
    "gp": optuna.samplers.GPSampler,
    "nsgaii": optuna.samplers.NSGAIISampler,
    "nsgaiii": optuna.samplers.NSGAIIISampler,
}
PRUNERS: dict[str, Callable[..., BasePruner]] = {
    "hyperband": optuna.pruners.HyperbandPruner,
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "median": optuna.pruners.MedianPruner,
    "percentile": optuna.pruners.PercentilePruner,
    "patient": optuna.pruners.PatientPruner,
    "threshold": optuna.pruners.ThresholdPruner,
    "wilcoxon": optuna.pruners.WilcoxonPruner,
    "none": optuna.pruners.NopPruner,
}
# Two seeds would walk two sequences, or visit the points of a grid in two orders: every worker uses the study's.
ONE_SEED = {"qmc", "grid", "bruteforce"}
# Set from the spec, and so not options.
FROM_SPEC = {"seed", "max_resource"}


def build_sampler(spec: StudySpec, trial_number: int = 0) -> BaseSampler:
    """Build the study's sampler for one trial, seeded from the study's seed and the trial's number.

    A sampler that is seeded once per worker would repeat itself after a restart, and give every worker the same first
    suggestions (optuna#2826).

    Raises:
        SpecError: unknown sampler or option, or a value that the sampler refuses.
    """
    name = spec.sampler.name
    seed = spec.seed if name in ONE_SEED else seed_of(spec, trial_number, "sampler")
    return _build("sampler", SAMPLERS, spec.sampler, {"seed": seed})  # type: ignore[no-any-return]


def build_pruner(spec: StudySpec) -> BasePruner:
    """Build the study's pruner.

    Raises:
        SpecError: unknown pruner or option, a value that the pruner refuses, or no `max_steps` where it is needed.
    """
    return _pruner(spec.pruner, spec.max_steps)


def seed_of(spec: StudySpec, trial_number: int, purpose: str) -> int:
    """A 32-bit seed that depends on the study's seed, the trial's number and what it is for, and on nothing else."""
    digest = hashlib.sha256(f"{spec.seed}/{trial_number}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:4], "big")


def _pruner(chosen: Named, max_steps: int | None) -> BasePruner:
    extra: dict[str, Any] = {}
    options = dict(chosen.options)
    if chosen.name == "hyperband":
        if max_steps is None:
            raise SpecError(
                "the hyperband pruner must know how many steps a full trial reports: add max_steps (--max-steps N), or "
                "`pruner: none` (--pruner none)"
            )
        extra["max_resource"] = max_steps
    elif chosen.name == "asha":
        # Optuna's "auto" is decided by each process's first finished trial: two workers would disagree.
        options.setdefault("min_resource", 1)
    elif chosen.name == "patient":
        wrapped = options.get("wrapped_pruner", "none")
        inner = Named(name=wrapped) if isinstance(wrapped, str) else Named(**_split(wrapped))
        options["wrapped_pruner"] = _pruner(inner, max_steps)
    return _build("pruner", PRUNERS, Named(name=chosen.name, options=options), extra)  # type: ignore[no-any-return]


def _split(wrapped: Any) -> dict[str, Any]:
    if not isinstance(wrapped, Mapping) or "name" not in wrapped:
        raise SpecError("wrapped_pruner must be a pruner's name, or a mapping with `name` and its options")
    return {"name": wrapped["name"], "options": {key: value for key, value in wrapped.items() if key != "name"}}


def _build(kind: str, known: Mapping[str, Callable[..., Any]], chosen: Named, extra: dict[str, Any]) -> Any:
    """Call the constructor with the chosen options, and put into one sentence what it refuses."""
    if chosen.name not in known:
        raise SpecError(f"unknown {kind} {chosen.name[:80]!r}{nearest(chosen.name, known)}")
    make = known[chosen.name]
    takes = [name for name in inspect.signature(make).parameters if name not in FROM_SPEC]
    for option in chosen.options:
        if option not in takes:
            hint = nearest(option, takes) if takes else ": it has no options"
            raise SpecError(f"the {kind} {chosen.name!r} has no option {option!r}{hint}")
    with warnings.catch_warnings():
        # Which samplers Optuna calls experimental is for docs/strategies, not for every worker's log.
        warnings.simplefilter("ignore")
        accepted = inspect.signature(make).parameters
        try:
            return make(**chosen.options, **{key: value for key, value in extra.items() if key in accepted})
        except (TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"the {kind} {chosen.name!r} refuses its options: {error}") from None
