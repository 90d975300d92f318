"""Studies for tests of the storage: created as orch creates them, taken by owners that are not there."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import optuna
import psycopg2

from storage import Database, attempts, open_database, open_storage, studies
from storage.attempts import Attempt, NotTaken, Owner, Taken

OWNER = Owner("test/0", "host", 1, "boot/1/1/1", ("GPU-1",))


class Shop:
    """One database with orch's verbs and Optuna's view of the same rows."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.database = open_database(url)
        self._storage = open_storage(url)

    def close(self) -> None:
        self.database.close()
        self._storage.engine.dispose()

    def clear(self) -> None:
        """Remove every study, with SQL of the tests' own, so that the next test finds an empty database."""
        with self.database.transaction() as tx:
            tx.run("TRUNCATE studies CASCADE")

    def create(
        self, name: str = "s", n_trials: int | None = None, directions: Sequence[str] = ("MINIMIZE",)
    ) -> studies.StudyRecord:
        record = studies.create(self.database, name, directions, {"name": name}, {}, n_trials)
        assert record is not None
        return record

    def optuna(self, name: str = "s", **options: Any) -> optuna.Study:
        """Optuna's view of a study, with a cache of its own that is empty at first."""
        return optuna.load_study(study_name=name, storage=self._storage, **options)

    def optuna_create(self, name: str, **options: Any) -> optuna.Study:
        return optuna.create_study(study_name=name, storage=self._storage, **options)

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
            return tx.all(sql, parameters or None)

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
def open_shop(server: str, template: str) -> Iterator[Shop]:
    """A database with the schema, to be shared by the tests of a module: `clear` it after each."""
    name = f"shop_{uuid.uuid4().hex[:8]}"
    with contextlib.closing(psycopg2.connect(dsn(server))) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
            shop = Shop(f"{server.rpartition('/')[0]}/{name}")
            try:
                yield shop
            finally:
                shop.close()
                cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")
