"""What tests share: a PostgreSQL server of their own, and a fresh database cloned from a template for each test."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest

from storage import open_database
from tests.runs import Orch
from tests.studies_at_hand import Shop, open_shop


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """URL of a private PostgreSQL server that this test run alone uses."""
    # Not pytest's tmp_path: its parents are closed to the user that the server runs as.
    home = Path(tempfile.mkdtemp(prefix="orch-test-", dir="/tmp"))
    home.chmod(0o711)
    environment = {**os.environ, "ORCH_HOME": str(home)}
    command = [sys.executable, "-P", "-m", "orchestrator.cli", "db"]
    subprocess.run([*command, "start"], env=environment, check=True, capture_output=True)
    try:
        shown = subprocess.run(
            [*command, "url", "--show-password"], env=environment, check=True, capture_output=True, text=True
        )
        yield shown.stdout.strip()
    finally:
        subprocess.run([*command, "stop"], env=environment, check=True, capture_output=True)
        shutil.rmtree(home)


def _run_sql(url: str, statement: str) -> None:
    connection = psycopg2.connect(url)
    connection.autocommit = True
    with contextlib.closing(connection), connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.fixture(scope="session")
def template(server: str) -> str:
    """Name of a database whose schema is built, for cloning."""
    name = f"template_{uuid.uuid4().hex[:8]}"
    _run_sql(server, f"CREATE DATABASE {name}")
    open_database(_named(server, name)).close()
    return name


def _named(server: str, name: str) -> str:
    return f"{server.rpartition('/')[0]}/{name}"


@contextlib.contextmanager
def _database(server: str, more: str = "") -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex[:8]}"
    _run_sql(server, f"CREATE DATABASE {name} {more}")
    yield _named(server, name)
    _run_sql(server, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def empty_database_url(server: str) -> Iterator[str]:
    """URL of a database with nothing in it."""
    with _database(server) as url:
        yield url


@pytest.fixture
def database_url(server: str, template: str) -> Iterator[str]:
    """URL of a database with the schema and no study."""
    with _database(server, f"TEMPLATE {template}") as url:
        yield url


@pytest.fixture(scope="module")
def open_for_all(server: str, template: str) -> Iterator[Shop]:
    """A database with the schema that the tests of a module share: `shop` empties it after each."""
    with open_shop(server, template) as shop:
        yield shop


@pytest.fixture
def shop(open_for_all: Shop) -> Iterator[Shop]:
    """An empty database with the schema, and short words for what tests do with it."""
    yield open_for_all
    open_for_all.clear()


@pytest.fixture
def orch(database_url: str, tmp_path: Path) -> Iterator[Orch]:
    """The `orch` command in an empty folder, with a database, an ORCH_HOME and a Ray folder of its own."""
    # Short, because Ray puts sockets there.
    with tempfile.TemporaryDirectory(prefix="orch-ray-", dir="/tmp") as ray_folder:
        yield Orch(database_url, tmp_path, {"RAY_TMPDIR": ray_folder})
