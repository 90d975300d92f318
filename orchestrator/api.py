"""What the command line and a notebook do with studies: create, load, run."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import platform
import secrets
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna

from orchestrator import objective as objective_code
from orchestrator import search
from orchestrator.errors import ObjectiveError, SpecError
from orchestrator.objective import Source
from orchestrator.spec import StudySpec, from_stored, parse, read_file
from storage import Database, embedded, open_database, open_storage, studies
from storage.errors import StudyNotFound
from storage.studies import StudyRecord

if TYPE_CHECKING:
    pass

RECORDED_PACKAGES = ("orch", "optuna", "torch", "torchvision", "ray", "numpy")


@dataclass(frozen=True)
class Checked:
    """A definition that was found good, and what is recorded beside it."""

    spec: StudySpec
    facts: dict[str, Any]
    seed_given: bool  # else the seed was drawn, and is no difference between two definitions


@dataclass(frozen=True)
class Created:
    """A study, and whether this call made it."""

    record: StudyRecord
    spec: StudySpec
    is_new: bool


def storage_url(url: str | None = None) -> str:
    """The URL that was given, else ORCH_STORAGE, else that of this machine's private server, which is started.

    Raises:
        StorageError: the private server cannot be started.
    """
    return url or os.environ.get("ORCH_STORAGE") or embedded.ensure_running()


def create_study(
    name: str | None = None, *, storage: str | None = None, file: str | None = None, **values: Any
) -> Created:
    """Create a study, or find it with the same definition.

    Args:
        name: The study's name; may stand in `file` instead.
        storage: PostgreSQL URL; see `storage_url`.
        file: A study.yaml; `values` win over it.
        **values: objective, direction, n_trials, max_steps, sampler, pruner, seed, gpus_per_trial, settings.

    Raises:
        OrchError: the definition is wrong, the objective cannot be imported, another study has the name, or the
            database cannot be reached; nothing is left behind.
    """
    checked = check(*gather(name, file, values))
    return write(storage_url(storage), checked)


def gather(name: str | None, file: str | None, values: Mapping[str, Any]) -> tuple[dict[str, Any], Path]:
    """Merge a study file with values that win over it; returns them with the folder that paths are seen from."""
    given = read_file(file) if file is not None else {}
    folder = _here()
    if file is not None and "objective" in given and "objective" not in values:
        folder = Path(file).resolve().parent
    if name is not None:
        given["name"] = name
    given.update(values)
    return given, folder


def check(given: Mapping[str, Any], folder: Path) -> Checked:
    """Validate a definition completely: keys, sampler, pruner, and the objective by importing it.

    Raises:
        SpecError, ObjectiveError: the first thing that is wrong.
    """
    spec = parse({"seed": secrets.randbelow(2**32), **given})
    search.build_sampler(spec)
    search.build_pruner(spec)
    reference = objective_code.resolve(spec.objective, folder)
    objective_code.check(reference, str(folder))
    facts = _facts(objective_code.read_source(reference, str(folder)), folder)
    return Checked(spec, facts, "seed" in given)


def write(
    url: str, checked: Checked, *, adopt: bool = False, count_existing: bool = False, accept: bool = False
) -> Created:
    """Write a checked definition: a new study, the same one again, or one for an Optuna study that is there (`adopt`).

    Raises:
        SpecError: the study exists with another definition; with another objective only, unless `accept`.
        StorageError: the database cannot be reached.
    """
    spec, facts = checked.spec, checked.facts
    database = open_database(url)
    try:
        if adopt:
            _check_directions(studies.get(database, spec.name), spec)
            record = studies.adopt(
                database, spec.name, spec.to_json(), facts, spec.n_trials, count_existing=count_existing
            )
            return Created(record, spec, True)
        directions = [word.upper() for word in spec.directions]
        made = studies.create(database, spec.name, directions, spec.to_json(), facts, spec.n_trials)
        if made is not None:
            return Created(made, spec, True)
        existing = studies.get(database, spec.name)
        return Created(existing, _same_definition(existing, checked, accept), False)
    finally:
        database.close()


def load_study(name: str, *, storage: str | None = None) -> optuna.Study:
    """Load a study as a normal `optuna.Study`, with the sampler and pruner it was created with.

    Raises:
        StudyNotFound: there is no such study.
    """
    url = storage_url(storage)
    database = open_database(url)
    try:
        spec = spec_of(studies.get(database, name))
    finally:
        database.close()
    return optuna.load_study(
        study_name=name, storage=open_storage(url), sampler=search.build_sampler(spec), pruner=search.build_pruner(spec)
    )


def run(
    name: str,
    *,
    storage: str | None = None,
    cpu: int | None = None,
    gpus: int | None = None,
    address: str | None = None,
    all_nodes: bool = False,
) -> optuna.Study:
    """Run a pool on a study until it is done; returns the study. Arguments are those of `orch pool start`.

    Raises:
        OrchError: see `orchestrator.pool.run_pool`.
    """
    from orchestrator.cluster import Wanted
    from orchestrator.pool import run_pool

    url = storage_url(storage)
    database = open_database(url)
    try:
        run_pool(plan_pool(url, database, name, Wanted(cpu, gpus, address, all_nodes)), database)
    finally:
        database.close()
    return load_study(name, storage=url)


def plan_pool(
    url: str, database: Database, name: str, wanted: Any, *, accept: bool = False, max_failures: int = 8
) -> Any:
    """Find this machine's copy of the study's objective, and put together what a pool needs.

    Raises:
        StudyNotFound: there is no such study, or it has no definition.
        ObjectiveError: the objective's file is missing, or differs from the recorded one.
    """
    from orchestrator.pool import PoolPlan  # Ray: only where a pool starts

    record = studies.get(database, name)
    spec = spec_of(record)
    reference, folder, source = find_objective(record, spec, accept=accept)
    facts = record.facts or {}
    if source.sha256 != facts["objective"]["sha256"]:
        studies.accept_objective(database, record.study_id, _facts(source, Path(folder)))
    return PoolPlan(url, record, spec, reference, folder, source, wanted, max_failures)


def spec_of(record: StudyRecord) -> StudySpec:
    """The definition of a study.

    Raises:
        StudyNotFound: it is an Optuna study without one.
    """
    if record.spec is None:
        raise StudyNotFound(
            f"study {record.name!r} is Optuna's and has no definition of ours: "
            f"`orch study create {record.name} --adopt --objective ...` gives it one"
        )
    return from_stored(record.spec)


def find_objective(record: StudyRecord, spec: StudySpec, *, accept: bool = False) -> tuple[str, str, Source]:
    """This machine's copy of the objective: seen from here, else where it was when the study was created.

    Raises:
        ObjectiveError: there is none, or only one that differs and `accept` is not set.
    """
    facts = record.facts or {}
    recorded, there = facts["objective"], facts["folder"]
    found: list[tuple[str, str, Source]] = []
    for folder in dict.fromkeys([str(_here()), there]):
        reference = objective_code.resolve(spec.objective, folder)
        try:
            found.append((reference, folder, objective_code.read_source(reference, folder)))
        except ObjectiveError:
            continue
    for candidate in found:
        if candidate[2].sha256 == recorded["sha256"]:
            return candidate
    if not found:
        raise ObjectiveError(
            f"the objective {spec.objective} is neither below {_here()} nor at {recorded['path']}: copy it here, or "
            "start the pool in its folder"
        )
    if not accept:
        raise ObjectiveError(
            f"{found[0][2].path} has changed since the study was created: sha256 {found[0][2].sha256}, recorded "
            f"{recorded['sha256']}; --accept-objective goes on with it"
        )
    return found[0]


def _same_definition(existing: StudyRecord, checked: Checked, accept: bool) -> StudySpec:
    """The stored definition, if the new one says the same."""
    spec = checked.spec
    if existing.spec is None:
        raise SpecError(
            f"there is an Optuna study {spec.name!r} already, without a definition: --adopt gives it this one"
        )
    stored = from_stored(existing.spec)
    old, new = stored.to_json(), spec.to_json()
    if not checked.seed_given:
        new["seed"] = old["seed"]
    for key in old:
        if old[key] != new[key]:
            raise SpecError(
                f"study {spec.name!r} exists with {key} = {_short(old[key])}, not {_short(new[key])}: choose another "
                f"name, or see `orch study show {spec.name}`"
            )
    if not accept and (existing.facts or {})["objective"]["sha256"] != checked.facts["objective"]["sha256"]:
        raise SpecError(
            f"study {spec.name!r} exists, and its objective has changed since: choose another name, or go on with the "
            "new one by --accept-objective (of `orch run` and `orch pool start`)"
        )
    return stored


def _check_directions(existing: StudyRecord, spec: StudySpec) -> None:
    wanted = tuple(word.upper() for word in spec.directions)
    if existing.directions != wanted:
        raise SpecError(
            f"study {spec.name!r} has the direction {', '.join(existing.directions).lower()}, not "
            f"{', '.join(spec.directions)}: a study's direction cannot change"
        )


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise SpecError("the working folder was deleted: cd to another one") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _facts(source: Source, folder: Path) -> dict[str, Any]:
    """What is recorded for people beside the definition."""
    return {
        "objective": {"path": source.path, "sha256": source.sha256, "source": source.text},
        "folder": str(folder),
        "git_commit": _git_commit(Path(source.path).parent),
        "versions": {"python": platform.python_version(), **_versions()},
        "created_by": f"{_user()}@{socket.gethostname()}",
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        return str(os.getuid())


def _versions() -> dict[str, str]:
    found = {}
    for name in RECORDED_PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git_commit(folder: Path) -> str | None:
    """The commit of the objective's checkout, with `-dirty` when it has changes; None outside one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
