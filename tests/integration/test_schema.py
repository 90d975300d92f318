"""The schema and the studies in it: built by whoever comes first, refused in one sentence, best trials."""

from __future__ import annotations

import contextlib
import math
import subprocess
import sys
import uuid
from pathlib import Path

import optuna
import psycopg2
import pytest
from optuna.trial import TrialState

from storage import Database, StorageError, StudyNotFound, open_database, open_storage, studies
from storage.database import _migrations
from tests.studies_at_hand import dsn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty_urls(server):
    """URLs of three databases with nothing in them."""
    names = [f"test_{uuid.uuid4().hex[:8]}" for _ in range(3)]
    with contextlib.closing(psycopg2.connect(dsn(server))) as connection:
        connection.autocommit = True
        with connection.cursor() as cursor:
            for name in names:
                cursor.execute(f"CREATE DATABASE {name}")
            yield [f"{server.rpartition('/')[0]}/{name}" for name in names]
            for name in names:
                cursor.execute(f"DROP DATABASE {name} WITH (FORCE)")


def catalogue(url: str) -> list[tuple[str, ...]]:
    """Every column of the schemas that are ours and Optuna's."""
    with contextlib.closing(psycopg2.connect(dsn(url))) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_schema, table_name, column_name, data_type FROM information_schema.columns"
            " WHERE table_schema IN ('public', 'orch') ORDER BY 1, 2, 3"
        )
        return cursor.fetchall()


def refusal(url: str) -> str:
    """The one sentence that refuses to open a database."""
    with pytest.raises(StorageError) as refused:
        open_database(url)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_eight_processes_on_an_empty_database(empty_urls, template, server):
    """Eight processes that open an empty database at once all succeed, and build one schema, three times over."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.opening", "8", *empty_urls], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    expected = catalogue(f"{server.rpartition('/')[0]}/{template}")
    assert len(expected) > 40
    for url in empty_urls:
        assert catalogue(url) == expected
        database = Database(url)
        with database.transaction() as tx:
            versions = tx.all("SELECT version FROM orch.version ORDER BY version")
            alembic = tx.all("SELECT * FROM alembic_version")
        database.close()
        assert [row["version"] for row in versions] == [number for number, _ in _migrations()]
        assert len(alembic) == 1


def test_opening_again_changes_nothing(database_url):
    """Opening a database that has the schema leaves it as it is."""
    before = catalogue(database_url)
    open_database(database_url).close()
    assert catalogue(database_url) == before


def test_a_database_of_optunas(empty_database_url):
    """A database that Optuna alone has used gets schema orch beside its studies, which stay."""
    storage = optuna.storages.RDBStorage(open_storage_url(empty_database_url))
    optuna.create_study(study_name="old", storage=storage).add_trial(optuna.create_trial(value=1.0))
    storage.remove_session()
    storage.engine.dispose()
    database = open_database(empty_database_url)
    record = studies.get(database, "old")
    database.close()
    assert (record.spec, record.desired, record.counts) == (None, None, {"COMPLETE": 1})


def open_storage_url(url: str) -> str:
    from storage.url import sqlalchemy_url

    return sqlalchemy_url(url)


def test_a_newer_schema(database_url):
    """A database that a newer orch has migrated is refused in one sentence that says to upgrade, and left alone."""
    with (
        contextlib.closing(psycopg2.connect(dsn(database_url))) as connection,
        connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("INSERT INTO orch.version VALUES (999, now())")
    assert "schema orch 999" in refusal(database_url)
    assert refusal(database_url).endswith("upgrade orch")


@pytest.mark.parametrize("opener", [open_database, open_storage])
@pytest.mark.parametrize(
    "change",
    [
        lambda url: "postgresql://orch:s3cr3t-word@127.0.0.1:1/orch",
        lambda url: "postgresql://orch:s3cr3t-word@127.0.0.1:1/orch?application_name=x",
        lambda url: "postgresql://127.0.0.1:1/orch?user=orch&password=s3cr3t-word",
        lambda url: f"{url.partition('://')[0]}://orch:s3cr3t-word@{url.rpartition('@')[2]}",
        lambda url: f"{url.rpartition('/')[0]}/no_such_database",
    ],
    ids=["port", "option", "password option", "wrong password", "no database"],
)
def test_a_server_that_cannot_be_used(server, opener, change):
    """An unreachable server, a wrong password or a missing database is one StorageError without any password."""
    url = change(server)
    with pytest.raises(StorageError) as refused:
        opener(url)
    said = str(refused.value)
    assert "s3cr3t" not in said
    assert server.partition("://")[2].partition("@")[0].partition(":")[2] not in said
    assert "\n" not in said
    assert "127.0.0.1" in said


def test_a_connection_that_was_lost(database_url):
    """When the server ends a connection, at most one transaction fails, and the next one has a new connection."""
    database = Database(database_url)
    with database.transaction() as tx:
        pid = tx.one("SELECT pg_backend_pid() AS pid")["pid"]
    with contextlib.closing(psycopg2.connect(dsn(database_url))) as other, other.cursor() as cursor:
        cursor.execute("SELECT pg_terminate_backend(%s, 10000)", (pid,))
    with contextlib.suppress(StorageError), database.transaction() as tx:
        tx.one("SELECT 1 AS one")
    with database.transaction() as tx:
        assert tx.one("SELECT pg_backend_pid() AS pid")["pid"] != pid
    database.close()


def test_transactions_are_whole(shop):
    """A transaction that raises leaves nothing behind, and the connection goes on."""

    def half() -> None:
        with shop.database.transaction() as tx:
            tx.run("INSERT INTO studies (study_name) VALUES ('half')")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        half()
    assert studies.find(shop.database, "half") is None
    with pytest.raises(StorageError, match="nonsense"):
        shop.rows("SELECT nonsense")
    assert studies.list_all(shop.database) == []


def test_creation_is_once(shop):
    """A name that is taken creates nothing; Optuna loads what was created, with its directions."""
    shop.create("s", 5, ["MAXIMIZE", "MINIMIZE"])
    assert studies.create(shop.database, "s", ["MINIMIZE"], {}, {}, None) is None
    record = studies.get(shop.database, "s")
    assert (record.directions, record.n_trials, record.desired) == (("MAXIMIZE", "MINIMIZE"), 5, "active")
    assert [direction.name for direction in shop.optuna().directions] == ["MAXIMIZE", "MINIMIZE"]
    with pytest.raises(StudyNotFound, match="did you mean 's'"):
        studies.get(shop.database, "ss")


def test_the_list_of_studies(shop):
    """Every study is listed, Optuna's own too, with its trials counted by state."""
    shop.create("ours", 5)
    plain = shop.optuna_create("plain")
    plain.tell(plain.ask(), 1.0)
    plain.ask()
    listed = studies.list_all(shop.database)
    assert [(study.name, study.n_trials, study.counts) for study in listed] == [
        ("ours", 5, {}),
        ("plain", None, {"COMPLETE": 1, "RUNNING": 1}),
    ]
    assert studies.counts(shop.database, listed[1].study_id) == listed[1].counts


@pytest.mark.parametrize(("direction", "best"), [("MINIMIZE", (2, -3.0)), ("MAXIMIZE", (1, 7.0))])
def test_the_best_trial(shop, direction, best):
    """The best trial is the first COMPLETE one with the best finite value in the study's direction."""
    study = shop.create(directions=[direction])
    assert studies.best_trial(shop.database, study) is None
    plain = shop.optuna()
    values = [5.0, 7.0, -3.0, math.inf, -math.inf, 7.0, -3.0]
    for value in values:
        plain.add_trial(optuna.create_trial(value=value))
    for state in (TrialState.PRUNED, TrialState.FAIL):
        for value in (100.0, -100.0):
            plain.add_trial(optuna.create_trial(state=state, value=value if state == TrialState.PRUNED else None))
    assert studies.best_trial(shop.database, study) == best


def test_no_best_trial(shop):
    """A study with several objectives has no best trial."""
    study = shop.create(directions=["MINIMIZE", "MAXIMIZE"])
    shop.optuna().add_trial(optuna.create_trial(values=[1.0, 2.0]))
    assert studies.best_trial(shop.database, study) is None


def test_optunas_tables_are_where_every_role_looks(empty_database_url):
    """Also for a role called orch, whose search path begins with our schema, Optuna's tables lie in public."""
    open_database(empty_database_url).close()
    open_database(empty_database_url).close()
    with Database(empty_database_url).transaction() as tx:
        user = tx.one("SELECT current_user AS name")
        tables = tx.all("SELECT tablename, schemaname FROM pg_tables WHERE schemaname IN ('orch', 'public')")
    assert user == {"name": "orch"}
    places = {row["tablename"]: row["schemaname"] for row in tables}
    assert len(places) == len(tables), "no table of ours is called like one of Optuna's"
    assert (places["studies"], places["trials"], places["specs"]) == ("public", "public", "orch")
