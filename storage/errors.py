"""The one tree of errors that orch raises on purpose: each message is one sentence that says what to do."""


class OrchError(Exception):
    """Something the user can mend: the command line prints the message alone and exits with 1."""


class StorageError(OrchError):
    """The database cannot be used as it is: wrong URL, unreachable, wrong version."""


class StudyNotFound(StorageError):
    """The study does not exist, or was deleted while it was used."""


class EmbeddedServerError(StorageError):
    """The private PostgreSQL server of this machine could not be started or stopped."""
