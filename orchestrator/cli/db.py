"""`orch db`: the private PostgreSQL server of this machine."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from orchestrator.cli.output import echo_json, echo_next, json_option
from storage import embedded
from storage.url import redact


@click.group()
def command() -> None:
    """The private PostgreSQL server of this machine.

    Commands that are given neither --storage nor ORCH_STORAGE use it, and start it when it is not running.

    \b
    Example: orch db status
    """


@command.command()
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="Let other machines in on this address of this machine; * for all of "
    "its addresses, 127.0.0.1 to close the server again. Kept for later starts.",
)
@click.option("--port", metavar="N", type=click.IntRange(1024, 65535), help="TCP port. Kept for later starts.")
def start(listen: str | None, port: int | None) -> None:
    """Start the server, or change how it listens.

    \b
    Example: orch db start --listen 192.168.1.10
    """
    started = embedded.start(listen, port)
    open_to = "this machine only" if started.listen is None else f"other machines too, on {started.listen}"
    click.echo(f"{started.did}, for {open_to}")
    click.echo(redact(started.url))
    if started.listen is not None:
        click.echo("note:  connections are not encrypted: use it in a network you trust", err=True)
    if os.environ.get("ORCH_STORAGE"):
        click.echo("note:  ORCH_STORAGE is set: the other commands use that database, not this server", err=True)
    if started.listen is None:
        echo_next("orch init", "orch db start --listen ADDRESS   # let other machines in")
    else:
        echo_next("orch db url --show-password   # ORCH_STORAGE for the other machines")


@command.command()
def stop() -> None:
    """Stop the server.

    Running trials wait for their database until it is started again.

    \b
    Example: orch db stop
    """
    click.echo("stopped" if embedded.stop() else "it was not running")
    echo_next("orch db start")


@command.command()
@json_option
def status(as_json: bool) -> None:
    """Show whether the server runs, where, and how big it is.

    \b
    Example: orch db status --json
    """
    found = embedded.status()
    if as_json:
        echo_json(asdict(found))
        return
    click.echo("running" if found.running else "stopped")
    if found.running:
        click.echo(f"pid       {found.pid}")
    if found.url is not None:
        click.echo(f"url       {found.url}")
        click.echo(f"listens   on {found.listen or '127.0.0.1, to this machine only'}, port {found.port}")
    click.echo(f"data      {found.data_dir}")
    if found.version is not None and found.size_bytes is not None:
        click.echo(f"version   PostgreSQL {found.version}")
        click.echo(f"size      {found.size_bytes / 1e6:.0f} MB")
    if not found.running:
        echo_next("orch db start")


@command.command()
@click.option("--show-password", is_flag=True, help="Print the password too: for ORCH_STORAGE on other machines.")
@click.option("--optuna", is_flag=True, help="In the form for plain optuna: postgresql+psycopg2://.")
def url(show_password: bool, optuna: bool) -> None:
    """Print the server's URL.

    Without the password unless asked for; the server is started if need be.

    \b
    Example: export ORCH_STORAGE=$(orch db url --show-password)
    """
    found = embedded.ensure_running()
    shown = found if show_password else redact(found)
    # SQLAlchemy 2.1 takes a plain postgresql:// for psycopg 3, which orch does not install.
    click.echo(shown.replace("postgresql://", "postgresql+psycopg2://", 1) if optuna else shown)
    if not show_password:
        echo_next("orch db url --show-password")
