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
# Options of these types take Python objects, which no file can hold.
NOT_JSON = ("Callable", "Base", "ndarray", "FrozenTrial")
JSON_TYPES: dict[str, type | tuple[type, ...]] = {
    "int": int, "float": (int, float), "bool": bool, "str": str, "None": type(None),
}  # fmt: skip


def build_sampler(spec: StudySpec, trial_number: int = 0) -> BaseSampler:
    """Build the study's sampler for one trial, seeded from the study's seed and the trial's number.

    A sampler that is seeded once per worker would repeat itself after a restart, and give every worker the same first
    suggestions (optuna#2826).

    Raises:
        SpecError: unknown sampler or option, or a value that the sampler refuses.
    """
    name = spec.sampler.name
    seed = spec.seed if name in ONE_SEED else seed_of(spec, trial_number, "sampler")
    _check("sampler", SAMPLERS, spec.sampler)
    return _build("sampler", SAMPLERS, name, {**spec.sampler.options, "seed": seed})  # type: ignore[no-any-return]


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
    options = dict(chosen.options)
    _check("pruner", PRUNERS, chosen)
    if chosen.name == "hyperband":
        if max_steps is None:
            raise SpecError(
                "the hyperband pruner must know how many steps a full trial reports: add max_steps (--max-steps N), or "
                "`pruner: none` (--pruner none)"
            )
        if not 1 <= options.get("min_resource", 1) <= max_steps:
            raise SpecError(f"the pruner 'hyperband' takes a min_resource from 1 to max_steps ({max_steps})")
        if options.get("reduction_factor", 2) < 2:
            raise SpecError("the pruner 'hyperband' takes a reduction_factor of 2 or more")
        options["max_resource"] = max_steps
    elif chosen.name == "asha" and options.setdefault("min_resource", 1) == "auto":
        raise SpecError("the pruner 'asha' takes a number for min_resource: `auto` may differ from worker to worker")
    elif chosen.name == "patient":
        options["wrapped_pruner"] = _wrapped(options.get("wrapped_pruner", "none"), max_steps)
    return _build("pruner", PRUNERS, chosen.name, options)  # type: ignore[no-any-return]


def _wrapped(inner: Any, max_steps: int | None) -> BasePruner:
    """The pruner that `patient` delays, by its name or as a mapping with options."""
    named = {"name": inner} if isinstance(inner, str) else inner
    if not isinstance(named, Mapping) or not isinstance(named.get("name"), str):
        raise SpecError("wrapped_pruner must be a pruner's name, or a mapping with `name` and its options")
    if named["name"] == "hyperband":
        # Optuna looks for Hyperband by isinstance: inside another pruner it would lose its brackets.
        raise SpecError("wrapped_pruner cannot be hyperband: use asha, which is one bracket of it")
    return _pruner(Named(name=named["name"], options={k: v for k, v in named.items() if k != "name"}), max_steps)


def _check(kind: str, known: Mapping[str, Callable[..., Any]], chosen: Named) -> None:
    """Refuse unknown names and options, and values that would only fail in a Worker's first trials."""
    if chosen.name not in known:
        raise SpecError(f"unknown {kind} {chosen.name[:80]!r}{nearest(chosen.name, known)}")
    takes = _options(known[chosen.name])
    for option, value in chosen.options.items():
        if option not in takes:
            hint = nearest(option, takes) if takes else ": it has no options"
            raise SpecError(f"the {kind} {chosen.name!r} has no option {option!r}{hint}")
        words = takes[option].split(" | ")
        if set(words) <= set(JSON_TYPES) and not any(_fits(value, JSON_TYPES[word]) for word in words):
            raise SpecError(f"the {kind} {chosen.name!r} takes {takes[option]} for {option}, not {value!r:.40}")


def _options(make: Callable[..., Any]) -> dict[str, str]:
    """The options of a sampler or pruner that a file can give, with their types as Optuna writes them."""
    found = {}
    for name, parameter in inspect.signature(make).parameters.items():
        written = parameter.annotation
        written = written if isinstance(written, str) else getattr(written, "__name__", str(written))
        if name == "wrapped_pruner" or not (name in FROM_SPEC or any(word in written for word in NOT_JSON)):
            found[name] = written
    return found


def _fits(value: Any, wanted: type | tuple[type, ...]) -> bool:
    return isinstance(value, wanted) and not (isinstance(value, bool) and wanted is not bool)


def _build(kind: str, known: Mapping[str, Callable[..., Any]], name: str, options: dict[str, Any]) -> Any:
    """Call the constructor, and put into one sentence what it refuses."""
    with warnings.catch_warnings():
        # Which samplers Optuna calls experimental is for docs/strategies, not for every worker's log.
        warnings.simplefilter("ignore")
        try:
            return known[name](**options)
        except (TypeError, ValueError, AttributeError) as error:
            raise SpecError(f"the {kind} {name!r} refuses its options: {error}") from None
