"""`orch dashboard`: optuna-dashboard on this machine."""

from __future__ import annotations

import click

from orchestrator.cli.output import storage_option


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), help="Default: 8080, or the next free one.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@storage_option
def command(port: int | None, host: str, storage: str | None) -> None:
    """Serve optuna-dashboard on this machine, until Ctrl-C.

    It has no authentication, and can change and delete studies. From another machine better go through ssh:
    `ssh -L 8080:127.0.0.1:8080 THIS_MACHINE`.

    \b
    Example: orch dashboard --port 8090
    """
    from orchestrator import api, dashboard

    server = dashboard.bind(host, port)
    if not dashboard.is_loopback(host):
        click.echo(
            f"warning: the dashboard has no authentication: whoever reaches {host} can change and delete studies",
            err=True,
        )
    with server:
        number = dashboard.serve(server, api.storage_url(storage), click.echo)
    raise click.exceptions.Exit(128 + number)
