"""`orch doctor`: what is wrong with this machine, and what to do about it."""

from __future__ import annotations

import os
from dataclasses import asdict

import click

from orchestrator.cli.output import echo_json, echo_next, json_option, storage_option

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command()
@json_option
@storage_option
def command(as_json: bool, storage: str | None) -> None:
    """Check this machine, and say what to do about what is wrong.

    Exit 1 if something fails; warnings, such as that there is no GPU, do not count. No server is started for it.

    \b
    Example: orch doctor
             orch doctor --json | jq '.[] | select(.status != "ok")'
    """
    from orchestrator.doctor import examine
    from orchestrator.finding import Finding

    findings: list[Finding] = []
    for finding in examine(storage or os.environ.get("ORCH_STORAGE") or None):
        findings.append(finding)
        if not as_json:
            echo_finding(finding.name, finding.status, finding.says, finding.advice)
    if as_json:
        echo_json([asdict(finding) for finding in findings])
    failed = [finding.name for finding in findings if finding.status == "fail"]
    if failed:
        click.echo(f"to mend: {', '.join(failed)}", err=True)
        raise click.exceptions.Exit(1)
    if not as_json:
        echo_next("orch init", "orch run study.yaml")


def echo_finding(name: str, status: str, says: str, advice: str | None) -> None:
    """Print one finding, and on a line of its own what to do."""
    click.echo(f"{click.style(status.ljust(4), fg=COLOURS[status])}  {name:<11}  {says}")
    if advice is not None:
        click.echo(f"{'':<4}  {'':<11}  -> {advice}")
