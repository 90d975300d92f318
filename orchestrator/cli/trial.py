"""`orch trial`: list and show."""

from __future__ import annotations

from shlex import quote
from typing import Any

import click

from orchestrator.cli.output import echo_json, echo_next, echo_table, json_option, number, storage_option

STATES = ["COMPLETE", "PRUNED", "FAIL", "RUNNING", "WAITING"]


@click.group()
def command() -> None:
    """List and show the trials of a study."""


@command.command("list")
@click.argument("study")
@click.option(
    "--state", type=click.Choice(STATES, case_sensitive=False), multiple=True, help="Only trials in this state."
)
@json_option
@storage_option
def list_(study: str, state: tuple[str, ...], as_json: bool, storage: str | None) -> None:
    """List the trials of STUDY.

    \b
    orch trial list digits --state FAIL
    """
    from orchestrator import api, read

    trials = read.trials_of(api.storage_url(storage), study, state)
    if as_json:
        echo_json(trials)
        return
    names = list(dict.fromkeys(name for trial in trials for name in trial["params"]))
    echo_table(
        ["trial", "state", "value", "steps", "seconds", *names],
        [
            (
                trial["number"],
                trial["state"]
                + (f" ({trial['end_reason']})" if trial["state"] == "FAIL" and trial["end_reason"] else ""),
                ", ".join(number(value) for value in trial["values"] or []) or "-",
                trial["last_step"] if trial["last_step"] is not None else "-",
                number(trial["duration_s"], 3),
                *(_short(trial["params"].get(name)) for name in names),
            )
            for trial in trials
        ],
    )
    failed = [trial for trial in trials if trial["state"] == "FAIL"]
    if failed:
        echo_next(f"orch trial show {quote(study)} {failed[0]['number']}")


@command.command()
@click.argument("study")
@click.argument("trial_number", metavar="NUMBER", type=int)
@json_option
@storage_option
def show(study: str, trial_number: int, as_json: bool, storage: str | None) -> None:
    """Show one trial: parameters, curve, attempts with their errors, and where each rank's output is.

    \b
    orch trial show digits 7
    """
    from orchestrator import api, read

    trial = read.trial_of(api.storage_url(storage), study, trial_number)
    if as_json:
        echo_json(trial)
        return
    values = ", ".join(number(value, 6) for value in trial["values"] or []) or "-"
    click.echo(f"trial {trial['number']}  {trial['state']}  {values}")
    for name, value in trial["params"].items():
        click.echo(f"  {name:<16} {value}")
    for name, value in trial["user_attrs"].items():
        click.echo(f"  {name:<16} {value}  (user attribute)")
    if trial["intermediate_values"]:
        curve = "  ".join(f"{step}: {number(value)}" for step, value in trial["intermediate_values"].items())
        click.echo(f"reports\n  {curve}")
    for attempt in trial["attempts"]:
        _echo_attempt(attempt)


def _echo_attempt(attempt: dict[str, Any]) -> None:
    ended = "running" if attempt["ended_at"] is None else f"{attempt['end_reason']} at {attempt['ended_at']:%H:%M:%S}"
    gpus = f", GPU {' '.join(attempt['gpus'])}" if attempt["gpus"] else ""
    click.echo(f"attempt {attempt['token'][:8]}  {attempt['started_at']:%Y-%m-%d %H:%M:%S}  {ended}")
    click.echo(f"  worker           {attempt['worker']} (host {attempt['host']}, pid {attempt['pid']}{gpus})")
    if attempt["log_path"]:
        click.echo(f"  output           {attempt['log_path']}/rank*.log on {attempt['host']}")
    if attempt["checkpoint_path"]:
        click.echo(f"  checkpoint       step {attempt['checkpoint_step']}: {attempt['checkpoint_path']}")
    if attempt["error"]:
        click.echo("  " + attempt["error"].replace("\n", "\n  "))


def _state(trial: dict[str, Any]) -> str:
    return f"FAIL ({trial['end_reason'] or 'by a script'})" if trial["state"] == "FAIL" else str(trial["state"])


def _short(value: Any) -> str:
    return "-" if value is None else number(value, 4) if isinstance(value, float) else str(value)
