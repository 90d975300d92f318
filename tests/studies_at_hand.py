"""Studies for tests of the storage: created as orch creates them, taken by owners that are not there."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import optuna
import psycopg2
import psycopg2.extras

from storage import Database, attempts, open_database, open_storage, studies
from storage.attempts import Attempt, NotTaken, Owner, Taken

OWNER = Owner("test/0", "host", 1, "boot/1/1", ("GPU-1",))


class Shop:
    """One database with orch's verbs and Optuna's view of the same rows."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = open_database(url)
        self._storages: list[Any] = []

    def close(self) -> None:
        self.database.close()
        for storage in self._storages:
            storage.engine.dispose()

    def create(
        self, name: str = "s", n_trials: int | None = None, directions: Sequence[str] = ("MINIMIZE",)
    ) -> studies.StudyRecord:
        record = studies.create(self.database, name, directions, {"name": name}, {}, n_trials)
        assert record is not None
        return record

    def optuna(self, name: str = "s", **options: Any) -> optuna.Study:
        """Optuna's view of a study through a storage of its own, without anything cached."""
        storage = open_storage(self.url)
        self._storages.append(storage)
        return optuna.load_study(study_name=name, storage=storage, **options)

    def optuna_create(self, name: str, **options: Any) -> optuna.Study:
        storage = open_storage(self.url)
        self._storages.append(storage)
        return optuna.create_study(study_name=name, storage=storage, **options)

    def take(
        self, study: studies.StudyRecord, token: uuid.UUID | None = None, database: Database | None = None
    ) -> Taken:
        taken = self.try_take(study, token, database)
        assert isinstance(taken, Taken), taken
        return taken

    def try_take(
        self, study: studies.StudyRecord, token: uuid.UUID | None = None, database: Database | None = None
    ) -> Taken | NotTaken:
        return attempts.take(
            database or self.database, study.study_id, OWNER, token or uuid.uuid4(), lambda number: f"/logs/{number}"
        )

    def settle(
        self, taken: Taken, state: str = "COMPLETE", values: Sequence[float] | None = (1.0,), reason: str = "done"
    ) -> bool:
        return attempts.settle(self.database, taken.token, state, values, reason)

    def attempts(self, study: studies.StudyRecord, number: int | None = None) -> list[Attempt]:
        return attempts.of_study(self.database, study.study_id, number)

    def rows(self, sql: str, **parameters: Any) -> list[dict[str, Any]]:
        with self.database.transaction() as tx:
            return tx.all(sql, parameters)

    def blocked(self) -> int:
        """How many sessions of this database wait for a lock."""
        with contextlib.closing(psycopg2.connect(dsn(self.url))) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            return int(cursor.fetchone()[0])  # type: ignore[index]


def dsn(url: str) -> str:
    from storage.url import psycopg2_dsn

    return psycopg2_dsn(url)


@contextlib.contextmanager
def open_shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    try:
        yield shop
    finally:
        shop.close()


def write(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(text)
    return str(path)
