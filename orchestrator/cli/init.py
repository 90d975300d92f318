"""`orch init`: a study.yaml and an objective to start from."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

import click

from orchestrator.cli.output import echo_next
from storage.errors import OrchError

NAMES = ("study.yaml", "objective.py")


@click.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path))
def command(folder: Path) -> None:
    """Write a study.yaml and an objective.py to start from into FOLDER (default: here).

    They run as they are: a small network on scikit-learn's digits, a few seconds per trial, nothing to download.
    Files that are there already are never overwritten.

    \b
    Example: orch init my-study
    """
    texts = templates()
    name = folder.resolve().name
    if name.isprintable() and name.replace("-", "").replace("_", "").isalnum():
        texts["study.yaml"] = texts["study.yaml"].replace("name: first-study", f'name: "{name}"', 1)
    write(folder, texts)
    for name in NAMES:
        click.echo(f"wrote {folder / name}")
    study = shlex.quote(str(folder / "study.yaml"))
    echo_next(
        f"orch run {study} --cpu 2   # on two CPU workers",
        f"orch run {study}           # on all free GPUs of this machine",
        "orch dashboard   # watch it in the browser",
    )


def templates() -> dict[str, str]:
    """The files to start from, by name."""
    return {name: (files("orchestrator") / "templates" / name).read_text(encoding="utf-8") for name in NAMES}


def write(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all of the files, or none.

    Raises:
        OrchError: one of them is there already, or the folder cannot be written to.
    """
    there = [name for name in texts if os.path.lexists(folder / name)]
    if there:
        raise OrchError(
            f"{folder / there[0]} exists already, and nothing was written: move it away, or name another folder"
        )
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                written.append(folder / name)
                file.write(text)
    except OSError as error:
        for path in written:
            with suppress(OSError):
                path.unlink()
        raise OrchError(
            f"cannot write to {error.filename or folder} ({error.strerror}): name a folder you may write to"
        ) from None
