"""Homes for tests of the private PostgreSQL server, which its user can enter and which leave nothing behind.

PYTEST_DONT_REWRITE: the tests import it before they name it as a plugin, which pytest would warn of.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path

import psycopg2
import pytest

from storage import embedded, pg_process

ENSURE = "from storage.embedded import ensure_running; print(ensure_running(), flush=True)"
REPOSITORY = Path(__file__).parents[2]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user run the server")


def own_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))
        return probe.getsockname()[0]
    return None


needs_network = pytest.mark.skipif(own_address() is None, reason="this machine has no address but 127.0.0.1")


def new_folder():
    # Not pytest's tmp_path: the server's user may not enter that.
    folder = Path(tempfile.mkdtemp(prefix="orch-test-", dir="/tmp"))
    folder.chmod(0o711)
    return folder


def remove(folder):
    """End what serves from the folder, by process id, and delete it."""
    for data in folder.rglob("data*"):
        if (data / "PG_VERSION").exists():
            for pid in pg_process._servers(data):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder)


@pytest.fixture
def empty_home(monkeypatch):
    """A machine on which no server was ever started; gives the folder that ORCH_HOME will be."""
    folder = new_folder()
    monkeypatch.setenv("ORCH_HOME", str(folder / "home"))
    monkeypatch.delenv("ORCH_PG_USER", raising=False)
    monkeypatch.delenv("ORCH_STORAGE", raising=False)
    yield folder / "home"
    remove(folder)


@pytest.fixture(scope="module")
def template_home():
    """A home whose server was created and stopped, to be copied."""
    folder = new_folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCH_HOME", str(folder / "home"))
        patch.delenv("ORCH_PG_USER", raising=False)
        embedded.ensure_running()
        embedded.stop()
    yield folder / "home"
    remove(folder)


@pytest.fixture
def made_home(empty_home, template_home):
    """A machine on which the server was created before, and does not run."""
    empty_home.mkdir(0o711)
    # The programs as hard links and the zeros of the write-ahead log as holes, or it would take as long as initdb.
    subprocess.run(["cp", "-al", *template_home.glob("pgsql-*"), empty_home], check=True)
    subprocess.run(
        ["cp", "-a", "--sparse=always", template_home / "pg", template_home / "pg.json", empty_home], check=True
    )
    return empty_home


def query(url, sql):
    with closing(psycopg2.connect(url, connect_timeout=5)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else None


def child(code=ENSURE, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def eventually(condition, process=None):
    """Wait for what another process does."""
    until = time.monotonic() + 30
    while not (found := condition()):
        assert time.monotonic() < until, "did not happen"
        assert process is None or process.poll() is None, "the process ended before it happened"
        time.sleep(0.005)
    return found


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def is_held(lock):
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(lock, fcntl.LOCK_UN)
    return False


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_bytes()


def password_of(home):
    return json.loads((home / "pg.json").read_text())["password"]
