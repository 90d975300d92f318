"""One connection to the database of the studies: transactions, plain errors, schema."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import psycopg2
import psycopg2.extras
from optuna.storages import RDBStorage

from storage.errors import StorageError
from storage.url import psycopg2_dsn, redact, redact_text, sqlalchemy_url

CONNECT_TIMEOUT_S = 10
# One number for "a schema is being built", so that pools that start together on an empty database take turns.
SCHEMA_LOCK = 0x6F726368

Row = dict[str, Any]


class Database:
    """A lazily opened psycopg2 connection in explicit transactions, safe to share between threads.

    It keeps no session state, so that it works through PgBouncer in transaction mode. A connection that the server
    closed is replaced at the next transaction.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._dsn = psycopg2_dsn(url)
        self._connection: psycopg2.extensions.connection | None = None
        self._lock = threading.RLock()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Run statements in one transaction: committed at the end, rolled back by an exception.

        Raises:
            StorageError: the server cannot be reached, or refused a statement; without the password.
        """
        with self._lock:
            connection = self._open()
            try:
                with connection.cursor(cursor_factory=psycopg2.extras.RealDictCursor) as cursor:
                    yield Transaction(cursor)
                connection.commit()
            except BaseException as error:
                self._undo(connection)
                if isinstance(error, psycopg2.Error):
                    raise self._explain(error) from error
                raise

    def close(self) -> None:
        """Close the connection; a later transaction opens a new one."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _open(self) -> psycopg2.extensions.connection:
        if self._connection is None or self._connection.closed:
            try:
                self._connection = psycopg2.connect(
                    self._dsn, connect_timeout=CONNECT_TIMEOUT_S, application_name="orch"
                )
            except psycopg2.Error as error:
                raise self._explain(error) from error
        return self._connection

    def _undo(self, connection: psycopg2.extensions.connection) -> None:
        try:
            connection.rollback()
        except psycopg2.Error:
            connection.close()

    def _explain(self, error: psycopg2.Error) -> StorageError:
        said = " ".join(redact_text(str(error), self.url).split()) or type(error).__name__
        return StorageError(f"the database {redact(self.url)} did not do what was asked: {said}")


class Transaction:
    """What may be done inside one transaction: statements with named parameters, rows as dicts."""

    def __init__(self, cursor: psycopg2.extras.RealDictCursor) -> None:
        self._cursor = cursor

    def run(self, sql: str, parameters: Mapping[str, Any] | None = None) -> int:
        """Execute a statement; returns how many rows it touched."""
        self._cursor.execute(sql, parameters)
        return self._cursor.rowcount

    def one(self, sql: str, parameters: Mapping[str, Any] | None = None) -> Row | None:
        """Execute a statement and return its first row, or None."""
        self._cursor.execute(sql, parameters)
        row = self._cursor.fetchone()
        return None if row is None else dict(row)

    def all(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[Row]:
        """Execute a statement and return its rows."""
        self._cursor.execute(sql, parameters)
        return [dict(row) for row in self._cursor.fetchall()]


def open_storage(url: str) -> RDBStorage:
    """Open the Optuna storage of a database whose schema exists (see `open_database`).

    Raises:
        StorageError: the URL is not one of PostgreSQL, or the server cannot be reached.
    """
    try:
        return RDBStorage(
            sqlalchemy_url(url),
            engine_kwargs={
                "pool_size": 2,
                "pool_pre_ping": True,
                "connect_args": {"connect_timeout": CONNECT_TIMEOUT_S},
            },
        )
    except StorageError:
        raise
    except Exception as error:  # SQLAlchemy's and Alembic's errors have no common root and quote the URL.
        said = " ".join(redact_text(str(getattr(error, "orig", None) or error), url).split())
        raise StorageError(f"cannot open the studies of {redact(url)}: {said}") from error


def open_database(url: str) -> Database:
    """Open a database of studies, and build what is missing of Optuna's tables and of schema orch.

    Raises:
        StorageError: the server cannot be reached, or its schema belongs to a newer orch.
    """
    database = Database(url)
    newest = _migrations()[-1][0]
    with database.transaction() as tx:
        version = _schema_version(tx)
    if version is None or version < newest:
        _build_schema(database)
    elif version > newest:
        raise StorageError(
            f"the database has schema orch {version}, newer than this orch knows ({newest}): upgrade orch"
        )
    return database


def _build_schema(database: Database) -> None:
    with database.transaction() as tx:
        tx.run("SELECT pg_advisory_xact_lock(%(key)s)", {"key": SCHEMA_LOCK})
        done = _schema_version(tx) or 0
        if done == _migrations()[-1][0]:
            return  # somebody else built it while we waited
        # Optuna creates its own tables on a connection of its own, while everyone else waits for our lock; and before
        # schema orch exists, where they would land for a role of that name.
        open_storage(database.url).engine.dispose()
        tx.run("CREATE SCHEMA IF NOT EXISTS orch")
        tx.run("CREATE TABLE IF NOT EXISTS orch.version (version integer PRIMARY KEY, applied_at timestamptz NOT NULL)")
        for version, sql in _migrations():
            if version > done:
                tx.run(sql)
                tx.run("INSERT INTO orch.version VALUES (%(version)s, clock_timestamp())", {"version": version})


def _schema_version(tx: Transaction) -> int | None:
    # Read from the catalogue and not by to_regclass, which may answer from what this backend cached before it waited.
    if tx.one("SELECT FROM pg_tables WHERE schemaname = 'orch' AND tablename = 'version'") is None:
        return None
    row = tx.one("SELECT max(version) AS version FROM orch.version")
    return None if row is None else row["version"]


def _migrations() -> Sequence[tuple[int, str]]:
    """The numbered files of storage/migrations, in order."""
    folder = files("storage.migrations")
    names = sorted(item.name for item in folder.iterdir() if item.name.endswith(".sql"))
    return [(int(name.split("_")[0]), (folder / name).read_text()) for name in names]
