"""What orch keeps in PostgreSQL, and how it is opened."""

from storage.database import Database, open_database, open_storage
from storage.errors import OrchError, StorageError, StudyNotFound

__all__ = ["Database", "OrchError", "StorageError", "StudyNotFound", "open_database", "open_storage"]
