"""What a pool shows while it runs: a live table on a terminal, one line per transition elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from storage import Database, studies
from storage.studies import StudyRecord


@dataclass
class Standing:
    """Where the study stands."""

    name: str
    n_trials: int | None
    counts: Mapping[str, int] = field(default_factory=dict)
    best: tuple[int, float] | None = None  # number and value

    def count(self, database: Database, study: StudyRecord) -> None:
        """Read the counts anew."""
        self.counts = studies.counts(database, study.study_id)
        self.best = studies.best_trial(database, study)

    def sentence(self) -> str:
        """Counts by state and the best value, on one line."""
        finished = sum(self.counts.get(state, 0) for state in ("COMPLETE", "PRUNED", "FAIL"))
        of = "" if self.n_trials is None else f" of {self.n_trials}"
        words = [f"{finished}{of} trials"]
        words += [f"{n} {state.lower()}" for state, n in sorted(self.counts.items()) if n]
        if self.best is not None:
            words.append(f"best {self.best[1]:.5g} (trial {self.best[0]})")
        return ", ".join(words)


class Progress:
    """Shows a pool to whoever started it."""

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=True) if sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, markup=False)

    def show(self, statuses: Sequence[Mapping[str, Any]]) -> None:
        """Redraw the live table; elsewhere only transitions are printed."""
        if self._live is not None:
            self._live.update(self._table(statuses))
            self._live.start()  # the first time; an empty display would scroll the screen

    def event(self, event: Mapping[str, Any]) -> None:
        """Print how a trial ended; starts are for the table."""
        kind, number = event["event"], event["trial"]
        if kind == "settled":
            steps = f"{event['steps']} step{'' if event['steps'] == 1 else 's'}"
            value = "" if event["value"] is None else f"  {event['value']:.5g}"
            reason = "" if event["reason"] in ("done", "pruned") else f"  ({event['reason']})"
            self.say(f"trial {number:<4} {event['state']:<8}{value}{reason}  {steps}, {event['duration_s']:.1f} s")
            if event["state"] == "FAIL":
                self.say(f"{event['error']}\n  output: {event['log_path']}")
        elif kind == "given_back":
            self.say(f"trial {number:<4} given back: it goes on with the next pool")
        elif kind == "cancelled":
            self.say(f"trial {number:<4} ended from outside (dashboard or another script)")

    def _table(self, statuses: Sequence[Mapping[str, Any]]) -> Table:
        table = Table(title=self.standing.sentence(), title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("worker", "trial", "step", "value", "seconds"):
            table.add_column(column, justify="left" if column == "worker" else "right")
        for status in statuses:
            trial, step, value = status.get("trial"), status.get("step"), status.get("value")
            table.add_row(
                status["worker"],
                "-" if trial is None else str(trial),
                "-" if step is None else str(step),
                "-" if value is None else f"{value:.5g}",
                "-" if trial is None else f"{status['running_s']:.0f}",
            )
        return table
