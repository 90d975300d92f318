"""What all commands share: --storage, --json, tables and the line that says what to run next."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

storage_option: Callable[[F], F] = click.option(
    "--storage",
    metavar="URL",
    default=None,
    help="PostgreSQL URL of the studies. Better given as ORCH_STORAGE: command lines are visible to other users. "
    "Without either, a private server of this machine is started on demand.",
)
json_option: Callable[[F], F] = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _finite(value: Any) -> Any:
    """Spell NaN and the infinities as strings: JSON has no words for them, and jq and browsers refuse Python's."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def echo_json(document: Any) -> None:
    """Print one JSON document, and nothing else, on stdout."""
    click.echo(json.dumps(_finite(document), indent=2, default=_plain, ensure_ascii=False, allow_nan=False))


def echo_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print left-aligned columns; cells are cut to no width, so that names can be copied."""
    cells = [[("" if cell is None else str(cell)) for cell in row] for row in rows]
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    for row in [[name.upper() for name in columns], *cells]:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def echo_next(*commands: str) -> None:
    """Say on stderr what to run next, so that stdout stays clean for pipes; ORCH_HINTS=off silences it in scripts."""
    if os.environ.get("ORCH_HINTS") == "off":
        return
    for i, command in enumerate(commands):
        click.echo(("next:  " if i == 0 else "       ") + command, err=True)


def number(value: float | None, digits: int = 5) -> str:
    """A value the way people read it: five significant digits, `-` for none."""
    return "-" if value is None else f"{value:.{digits}g}"
