"""`orch pool start`: workers for a study, on this machine or a Ray cluster."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click

from orchestrator.cli.output import echo_next, storage_option


@click.group()
def command() -> None:
    """Start workers on this machine or a Ray cluster."""


def worker_options(function: Any) -> Any:
    """The flags that say which Workers a pool has."""
    options = [
        click.option("--gpus", type=click.IntRange(1), help="Workers, one on each GPU. Default: all free GPUs."),
        click.option("--cpu", type=click.IntRange(1), help="Workers without a GPU."),
        click.option("--address", metavar="RAY", help="Ray cluster to join: auto, HOST:PORT. Default: a private Ray."),
        click.option("--all-nodes", is_flag=True, help="With --address: cover the whole cluster, not only this node."),
        click.option("--cpus-per-worker", type=click.IntRange(1), help="Cores of a Worker. Default: cores / Workers."),
        click.option("--max-failures", type=click.IntRange(1), default=8, show_default=True,
                     help="Stop the pool when so many trials in a row have failed."),
    ]  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@command.command()
@click.argument("study")
@worker_options
@click.option("--accept-objective", is_flag=True, help="Go on with an objective file that has changed.")
@storage_option
def start(study: str, accept_objective: bool, storage: str | None, **flags: Any) -> None:
    """Start a pool for STUDY: takes trials until the study is done. Ctrl-C drains, twice stops.

    \b
    orch pool start digits                     all free GPUs of this machine
    orch pool start digits --cpu 2             two Workers without a GPU
    orch pool start digits --address auto --all-nodes
    """
    start_pool(study, storage, accept_objective, **flags)


def start_pool(
    study: str,
    storage: str | None,
    accept_objective: bool = False,
    *,
    gpus: int | None,
    cpu: int | None,
    address: str | None,
    all_nodes: bool,
    cpus_per_worker: int | None,
    max_failures: int,
) -> None:
    """Run a pool in the foreground; leaves with 130 or 143 when it was interrupted."""
    if gpus is not None and cpu is not None:
        raise click.UsageError("--gpus and --cpu exclude each other")
    from orchestrator import api
    from orchestrator.cluster import Wanted
    from orchestrator.pool import run_pool
    from storage import open_database

    url = api.storage_url(storage)
    database = open_database(url)
    wanted = Wanted(cpu, gpus, address, all_nodes, cpus_per_worker)
    plan = api.plan_pool(url, database, study, wanted, accept=accept_objective, max_failures=max_failures)
    result = run_pool(plan, database)
    database.close()
    click.echo(f"{study} {result.reason}: {result.standing.sentence()}", err=True)
    if result.reason == "stopped":
        echo_next(f"orch study resume {quote(study)}")
        return
    if result.signal is not None:
        echo_next(f"orch pool start {quote(study)}")
        raise click.exceptions.Exit(128 + result.signal)
    best = [] if result.standing.best is None else [f"orch study best {quote(study)}"]
    echo_next(*best, f"orch trial list {quote(study)}", "orch dashboard")
