"""What orch refuses, beside what the storage refuses: each message is one sentence that says what to do."""

from __future__ import annotations

from storage.errors import OrchError


class SpecError(OrchError):
    """The definition of a study is wrong; refused before anything is written."""


class ObjectiveError(OrchError):
    """The objective cannot be imported, or is not the one the study was created with."""


class PoolError(OrchError):
    """The pool cannot start, or cannot go on."""
