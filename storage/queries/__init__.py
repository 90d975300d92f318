"""Named SQL, one file per subject: ``-- name: NAME`` starts a statement, and the comment after it says what it does."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def load(subject: str) -> dict[str, str]:
    """Read the statements of ``queries/SUBJECT.sql`` by their names."""
    text = (files(__package__) / f"{subject}.sql").read_text()
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))
