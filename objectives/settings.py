"""Refuses settings that nobody reads, so that a typing error does not quietly train something else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any


def check(settings: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise a ValueError naming the nearest known key if ``settings`` has a key that is not in ``known``."""
    for key in settings:
        if key not in known:
            nearest = get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"Unknown setting {key!r}: did you mean {nearest!r}? Known: {', '.join(sorted(known))}")
