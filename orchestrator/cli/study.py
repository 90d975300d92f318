"""`orch study`: create, list, show, best, stop, resume, delete."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click

from orchestrator.cli.output import echo_json, echo_next, echo_table, json_option, number, storage_option


@click.group()
def command() -> None:
    """Create, list, show, stop and delete studies."""


def definition_options(function: Any) -> Any:
    """The flags that define a study; a flag wins over the same key of --file."""
    options = [
        click.option("--file", "-f", type=click.Path(), help="A study.yaml; flags win over it."),
        click.option("--objective", metavar="REF", help="package.module:function or path/to/file.py:function."),
        click.option(
            "--direction", type=click.Choice(["minimize", "maximize"]), multiple=True,
            help="Default: minimize. Several times for several objectives.",
        ),
        click.option("--n-trials", type=int, help="The budget over all pools; without it pools run until drained."),
        click.option("--max-steps", type=int, help="How many steps a full trial reports; hyperband needs it."),
        click.option("--sampler", metavar="NAME[:K=V,...]", help="Default: tpe. E.g. tpe:n_startup_trials=20."),
        click.option("--pruner", metavar="NAME[:K=V,...]", help="Default: hyperband. E.g. asha:reduction_factor=3."),
        click.option("--seed", type=int, help="Default: chosen at random, and kept with the study."),
        click.option("--gpus-per-trial", type=int, help="Ranks of one trial: it trains with DDP. Default: 1."),
        click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="In trial.settings[KEY]."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def given_values(flags: dict[str, Any], file: str | None) -> dict[str, Any]:
    """The flags that were typed, as keys of the definition; --set adds to the file's settings."""
    from orchestrator.spec import parse_pairs, read_file

    values = {key: value for key, value in flags.items() if value is not None and value != ()}
    if "direction" in values:
        values["direction"] = list(values["direction"])
    if "settings" in values:
        before = (read_file(file).get("settings") or {}) if file else {}
        values["settings"] = {**before, **parse_pairs(values["settings"])}
    return values


@command.command()
@click.argument("name", required=False)
@definition_options
@click.option("--adopt", is_flag=True, help="Give the definition to an Optuna study that is already there.")
@click.option("--count-existing", is_flag=True, help="With --adopt: its finished trials count against --n-trials.")
@storage_option
def create(
    name: str | None, file: str | None, adopt: bool, count_existing: bool, storage: str | None, **flags: Any
) -> None:
    """Create the study NAME from flags, from a file, or both; refused early, in one sentence.

    \b
    orch study create digits --objective objectives.digits:objective \\
        --direction maximize --n-trials 20 --max-steps 9
    orch study create -f study.yaml --n-trials 100
    """
    from orchestrator import api

    given, folder = api.gather(name, file, given_values(flags, file))
    if "name" not in given:
        raise click.UsageError("the study needs a name: orch study create NAME, or `name:` in the file")
    checked = api.check(given, folder)  # before the private server is started for it
    created = api.write(api.storage_url(storage), checked, adopt=adopt, count_existing=count_existing)
    spec = created.spec
    if not created.is_new:
        click.echo(f"study {spec.name} exists already with this definition")
    else:
        click.echo(f"{'adopted' if adopt else 'created'} study {spec.name}: {_summary(spec)}")
    echo_next(f"orch pool start {quote(spec.name)}", f"orch study show {quote(spec.name)}")


@command.command("list")
@json_option
@storage_option
def list_(as_json: bool, storage: str | None) -> None:
    """List all studies, also plain Optuna ones.

    \b
    orch study list --json
    """
    from orchestrator import api
    from storage import open_database, studies

    database = open_database(api.storage_url(storage))
    rows = [(record, studies.best_trial(database, record)) for record in studies.list_all(database)]
    database.close()
    if as_json:
        echo_json([_as_json(record, best) for record, best in rows])
        return
    echo_table(
        ["name", "direction", "trials", "running", "best", "state"],
        [
            (
                record.name, ", ".join(record.directions).lower(), _progress_of(record),
                record.counts.get("RUNNING", 0), number(best[1] if best else None), record.desired or "(plain Optuna)",
            )
            for record, best in rows
        ],
    )  # fmt: skip
    if not rows:
        echo_next("orch init", "orch study create NAME --objective FILE.py:FUNCTION ...")


@command.command()
@click.argument("name")
@json_option
@storage_option
def show(name: str, as_json: bool, storage: str | None) -> None:
    """Show the definition of a study and where it stands.

    \b
    orch study show digits
    """
    from orchestrator import api
    from storage import open_database, studies

    database = open_database(api.storage_url(storage))
    record = studies.get(database, name)
    best = studies.best_trial(database, record)
    database.close()
    if as_json:
        echo_json(_as_json(record, best, whole=True))
        return
    click.echo(f"{record.name}  ({', '.join(record.directions).lower()}, {record.desired or 'plain Optuna study'})")
    click.echo(f"  trials      {_progress_of(record)}  {_states(record.counts)}")
    if best is not None:
        click.echo(f"  best        {number(best[1])}  (trial {best[0]})")
    if record.spec is not None and record.facts is not None:
        for key, value in record.spec.items():
            if key not in ("name", "direction", "n_trials"):
                click.echo(f"  {key:<11} {_readable(value)}")
        objective = record.facts["objective"]
        click.echo(f"  source      {objective['path']}  sha256 {objective['sha256'][:12]}")
        click.echo(f"  git commit  {record.facts['git_commit'] or '-'}")
        click.echo(f"  created     {record.created_at:%Y-%m-%d %H:%M:%S %Z} by {record.facts['created_by']}")
    echo_next(f"orch trial list {quote(name)}", f"orch study best {quote(name)}")


@command.command()
@click.argument("name")
@json_option
@storage_option
def best(name: str, as_json: bool, storage: str | None) -> None:
    """Print the best trial of a study: value, parameters, checkpoint. Several objectives: the Pareto front.

    \b
    orch study best digits --json | jq .params
    """
    from orchestrator import api, read
    from storage import StudyNotFound

    trials = read.best_trials(api.storage_url(storage), name)
    if not trials:
        raise StudyNotFound(
            f"study {name!r} has no complete trial yet: `orch trial list {quote(name)}` shows what there is"
        )
    if as_json:
        echo_json(trials[0] if len(trials[0]["values"]) == 1 else trials)
        return
    for trial in trials:
        echo_best(trial)
    echo_next(f"orch trial show {quote(name)} {trials[0]['number']}")


def echo_best(trial: dict[str, Any]) -> None:
    """Print a trial the way people want the best one: number, value, parameters, weights."""
    click.echo(f"trial {trial['number']}  {', '.join(number(value, 6) for value in trial['values'])}")
    for key, value in trial["params"].items():
        click.echo(f"  {key:<16} {value}")
    if trial["checkpoint"]:
        click.echo(f"  checkpoint       {trial['checkpoint']}")


@command.command()
@click.argument("name")
@storage_option
def stop(name: str, storage: str | None) -> None:
    """Take no more trials for a study; those that run are finished. trial.study.stop() does the same.

    \b
    orch study stop digits
    """
    _set_desired(name, "stopped", storage)
    click.echo(f"stopped study {name}: its pools end when their running trials are finished")
    echo_next(f"orch study resume {quote(name)}")


@command.command()
@click.argument("name")
@storage_option
def resume(name: str, storage: str | None) -> None:
    """Let pools take trials of a stopped study again.

    \b
    orch study resume digits
    """
    _set_desired(name, "active", storage)
    click.echo(f"study {name} is active")
    echo_next(f"orch pool start {quote(name)}")


def _set_desired(name: str, desired: str, storage: str | None) -> None:
    from orchestrator import api
    from storage import open_database, studies

    database = open_database(api.storage_url(storage))
    studies.set_desired(database, studies.get(database, name).study_id, desired)
    database.close()


@command.command()
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@storage_option
def delete(name: str, yes: bool, storage: str | None) -> None:
    """Delete a study with all its trials, attempts, logs and checkpoints; asks first.

    \b
    orch study delete digits --yes
    """
    from orchestrator import api, files
    from storage import open_database, studies

    database = open_database(api.storage_url(storage))
    record = studies.get(database, name)
    if not yes and not click.confirm(f"delete study {name} with its {sum(record.counts.values())} trials?", err=True):
        click.echo("nothing was deleted", err=True)
        return
    studies.delete(database, record.study_id)
    database.close()
    if record.uid is not None:
        files.remove_study(record.uid)
    click.echo(f"deleted study {name}")


def _summary(spec: Any) -> str:
    budget = "no limit" if spec.n_trials is None else f"{spec.n_trials} trials"
    steps = "" if spec.max_steps is None else f" of up to {spec.max_steps} steps"
    pruner = "no pruner" if spec.pruner.name == "none" else f"{spec.pruner.name} pruner"
    return f"{'/'.join(spec.directions)}, {budget}{steps}, {spec.sampler.name} sampler, {pruner}, seed {spec.seed}"


def _progress_of(record: Any) -> str:
    finished = sum(record.counts.get(state, 0) for state in ("COMPLETE", "PRUNED", "FAIL"))
    return f"{finished - (record.n_history or 0)}{'' if record.n_trials is None else f'/{record.n_trials}'}"


def _states(counts: dict[str, int]) -> str:
    return ", ".join(f"{n} {state.lower()}" for state, n in sorted(counts.items()))


def _readable(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"name", "options"}:
        return " ".join([value["name"], *(f"{key}={item}" for key, item in value["options"].items())])
    if isinstance(value, dict):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return "-" if value is None else str(value)


def _as_json(record: Any, best: tuple[int, float] | None, *, whole: bool = False) -> dict[str, Any]:
    document = {
        "name": record.name,
        "directions": list(record.directions),
        "desired": record.desired,
        "n_trials": record.n_trials,
        "counts": record.counts,
        "best_trial": None if best is None else {"number": best[0], "value": best[1]},
        "created_at": record.created_at,
    }
    return {**document, "spec": record.spec, "facts": record.facts} if whole else document
