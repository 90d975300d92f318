"""The `orch` command: one module per noun, loaded only when its noun is typed, so that help is instant."""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

from storage.errors import OrchError

# noun -> what `orch --help` says of it; the module of the same name holds the click command `command`.
NOUNS = {
    "study": "Create, list, show, stop and delete studies.",
    "trial": "List and show the trials of a study.",
    "pool": "Start workers on this machine or a Ray cluster.",
    "db": "The private PostgreSQL server of this machine.",
    "init": "Write a study.yaml and an objective to start from.",
    "run": "Create a study from a file, run it, print the best trial.",
    "dashboard": "Serve optuna-dashboard on this machine.",
    "doctor": "Check this machine, and say what to do about what is wrong.",
}


class Nouns(click.Group):
    """A click group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every noun, in the order people meet them."""
        return list(NOUNS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of one noun."""
        if cmd_name not in NOUNS:
            return None
        command: click.Command = importlib.import_module(f"orchestrator.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the nouns without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(NOUNS.items()))


@click.command(cls=Nouns, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="orch", prog_name="orch")
@click.option("-v", "--verbose", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def root(ctx: click.Context, verbose: bool) -> None:
    """Hyperparameter studies on GPU machines, the Optuna way.

    \b
    orch init                     write a study.yaml and an objective to start from
    orch run study.yaml           create the study, run it here, print the best trial
    orch dashboard                watch it in the browser
    """
    ctx.obj = verbose


def main() -> NoReturn:
    """Run `orch`: errors the user can mend are one line and exit 1; usage 2; interrupted 130."""
    verbose = "-v" in sys.argv[1:2] or "--verbose" in sys.argv[1:2]
    try:
        code = root.main(standalone_mode=False)
    except click.exceptions.Exit as error:
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = 130
    except BrokenPipeError:
        # `orch trial list | head`: nobody reads any more, and the interpreter must not complain about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except OrchError as error:
        if verbose:
            raise
        click.echo(f"orch: {error}", err=True)
        code = 1
    sys.exit(code if isinstance(code, int) else 0)
