"""`orch run`: create a study from a file if needed, run it, print the best trial."""

from __future__ import annotations

import time
from shlex import quote
from typing import Any

import click

from orchestrator.cli.output import echo_next, storage_option
from orchestrator.cli.pool import start_pool, worker_options


@click.command()
@click.argument("file", type=click.Path(dir_okay=False))
@click.option("--here", is_flag=True, help="Run one trial in this process, without Ray: for print and pdb.")
@worker_options
@click.option("--accept-objective", is_flag=True, help="Go on with an objective file that has changed.")
@storage_option
def command(file: str, here: bool, accept_objective: bool, storage: str | None, **flags: Any) -> None:
    """Create the study of FILE if needed, run a pool on it, print the best trial.

    \b
    orch run study.yaml
    orch run study.yaml --cpu 2
    orch run study.yaml --here          one trial in the foreground, for pdb
    """
    from orchestrator import read
    from orchestrator.cli.study import echo_best

    # A trial in the foreground is for changing the objective and looking again: the file as it is now.
    url, name = _create(file, storage, accept_objective or here)
    if here:
        _run_here(url, name)
        return
    start_pool(name, url, accept_objective, **flags)
    for trial in read.best_trials(url, name):
        echo_best(trial)


def _create(file: str, storage: str | None, accept_objective: bool) -> tuple[str, str]:
    from orchestrator import api

    given, folder = api.gather(None, file, {})
    if "name" not in given:
        raise click.UsageError(f"{file} needs a `name:`")
    checked = api.check(given, folder)
    url = api.storage_url(storage)
    created = api.write(url, checked, accept=accept_objective)
    click.echo(f"{'created' if created.is_new else 'going on with'} study {created.spec.name}", err=True)
    return url, created.spec.name


def _run_here(url: str, name: str) -> None:
    """Run one trial in this process."""
    from orchestrator import api
    from orchestrator.here import run_here
    from orchestrator.progress import Progress, Standing
    from storage import open_database, studies
    from storage.attempts import NotTaken

    database = open_database(url)
    record = studies.get(database, name)
    database.close()
    reference, folder, _ = api.find_objective(record, api.spec_of(record), accept=True)
    started = time.monotonic()
    event = run_here(url, name, reference, folder)
    if isinstance(event, NotTaken):
        click.echo(f"no trial was taken: {event.value}", err=True)
        return
    Progress(Standing(name, None)).event({**event, "duration_s": time.monotonic() - started})
    echo_next(f"orch trial show {quote(name)} {event['trial']}")
    if event.get("state") == "FAIL":
        raise click.exceptions.Exit(1)
