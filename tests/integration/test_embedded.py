"""The private PostgreSQL server, for real: created, started, stopped, killed, on full disks and taken ports."""

import json
import os
import re
import signal
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import psycopg2
import pytest
from click.testing import CliRunner
from embedded_homes import ENSURE, as_root, child, eventually, is_held, password_of, query

from storage import embedded, pg_process
from storage.errors import EmbeddedServerError

pytest_plugins = ("embedded_homes",)


def test_two_commands_at_once_get_one_server(empty_home):
    """Two processes that start on an empty machine at the same moment get the same URL, and one server runs."""
    both = [child(), child()]
    answers = [process.communicate(timeout=60) for process in both]
    urls = {out.strip() for out, _ in answers}
    assert len(urls) == 1, answers
    assert query(urls.pop(), "select current_user, current_database()") == [("orch", "orch")]
    servers = pg_process._servers(empty_home / "pg/data")
    parents = {int(re.search(r"PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) for pid in servers}
    assert set(servers) & parents == {embedded.status().pid}


def test_the_server_survives_its_starter(made_home):
    """Ctrl-C, or a kill of everything in the starter's session, leaves the server alone."""
    process = child(ENSURE + "; input()", start_new_session=True)
    url = process.stdout.readline().strip()
    pid = embedded.status().pid
    assert os.getsid(pid) == pid
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert embedded.status().pid == pid
    assert query(url, "select 1") == [(1,)]
    assert embedded.ensure_running() == url


def test_a_crash_loses_nothing_even_if_its_process_id_is_reused(made_home):
    """After a power cut the next command starts the server again, though the old id is another process's by now."""
    url = embedded.ensure_running()
    query(url, "create table kept as select 7 as value")
    data = made_home / "pg/data"
    os.kill(embedded.status().pid, signal.SIGKILL)
    eventually(lambda: not pg_process._servers(data))
    owner = data.stat().st_uid if os.geteuid() == 0 else None
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=owner) as stranger:
        pid_file = data / "postmaster.pid"
        pid_file.write_text("\n".join([str(stranger.pid), *pid_file.read_text().splitlines()[1:]]) + "\n")
        assert embedded.status().running is False
        assert embedded.ensure_running() == url
        assert query(url, "select value from kept") == [(7,)]
        assert stranger.poll() is None


def test_a_start_waits_for_the_rest_of_a_killed_server(made_home):
    """A process that outlives its killed server is waited for: a second server beside it would destroy the data."""
    url = embedded.ensure_running()
    old = embedded.status().pid
    with closing(psycopg2.connect(url)) as connection:
        survivor = connection.info.backend_pid
        os.kill(survivor, signal.SIGSTOP)
        os.kill(old, signal.SIGKILL)
        eventually(lambda: pg_process._servers(made_home / "pg/data") == [survivor])
        process = child()
        with open(made_home / "pg.lock") as lock:
            eventually(lambda: is_held(lock), process)
        assert pg_process._servers(made_home / "pg/data") == [survivor]
        os.kill(survivor, signal.SIGCONT)
        answer, errors = process.communicate(timeout=60)
    assert answer.strip() == url, errors
    assert embedded.status().pid != old


def test_an_empty_pid_file_of_a_full_disk_does_not_matter(made_home):
    """A pid file without content, which PostgreSQL refuses, is cleared away."""
    (made_home / "pg/data/postmaster.pid").touch(mode=0o600)
    assert query(embedded.ensure_running(), "select 1") == [(1,)]


def test_a_creation_killed_half_way_is_done_again(empty_home):
    """A kill -9 in the middle of initdb leaves nothing that the next command trips over."""
    process = child(start_new_session=True)
    eventually(lambda: list(empty_home.glob("pg/data.new-*/PG_VERSION")), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (empty_home / "pg/data").exists()
    assert query(embedded.ensure_running(), "select 1") == [(1,)]
    assert sorted(path.name for path in (empty_home / "pg").iterdir()) == ["data", "server.log"]


def test_a_taken_port_is_named_with_the_way_out(made_home):
    """When another program sits on the kept port, one line says which and what to do, and doing it works for good."""
    port = embedded.status().port
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(EmbeddedServerError, match=f"port {port} .*`orch db start --port N`") as raised:
            embedded.ensure_running()
        assert "\n" not in str(raised.value)
        other = embedded.free_port()
        assert f":{other}/" in embedded.start(port=other).url
    embedded.stop()
    assert query(embedded.ensure_running(), "show port") == [(str(other),)]


def test_a_new_port_that_is_taken_leaves_the_running_server_alone(made_home):
    """`--port` to a taken port fails before anybody is disconnected."""
    url = embedded.ensure_running()
    before = embedded.status().pid
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(EmbeddedServerError, match="is taken"):
        embedded.start(port=taken.getsockname()[1])
    assert embedded.status().pid == before
    assert query(url, "select 1") == [(1,)]


def test_data_of_another_version_are_refused(made_home):
    """Data that no PostgreSQL here can read are one line that names both versions."""
    (made_home / "pg/data/PG_VERSION").write_text("9\n")
    with pytest.raises(EmbeddedServerError, match=r"are of PostgreSQL 9, and this machine has .*: install"):
        embedded.ensure_running()


def test_a_new_release_of_the_wheel_replaces_the_copied_programs(made_home):
    """When the wheel's release changed, the next start copies its programs again and keeps the data."""
    (copy,) = made_home.glob("pgsql-*")
    release = (copy / "release").read_text()
    (copy / "release").unlink()  # it is a hard link
    (copy / "release").write_text("0.0.1")
    (copy / "stale").touch()
    embedded.ensure_running()
    assert (copy / "release").read_text() == release
    assert not (copy / "stale").exists()
    assert list(made_home.glob("pgsql-*")) == [copy]


def test_a_folder_shared_by_two_machines_gets_no_second_server(made_home):
    """Where another machine's server uses the folder, it is neither started, nor stopped, nor called stopped."""
    settings = json.loads((made_home / "pg.json").read_text())
    (made_home / "pg.json").write_text(json.dumps({**settings, "host": "node7"}))
    (made_home / "pg/data/postmaster.pid").write_text("1\n")
    for command in (embedded.ensure_running, embedded.stop, embedded.status):
        with pytest.raises(EmbeddedServerError, match="runs on node7: set ORCH_STORAGE"):
            command()
    (made_home / "pg/data/postmaster.pid").unlink()
    assert query(embedded.ensure_running(), "select 1") == [(1,)]


def test_a_lost_password_is_told(made_home):
    """Data whose password file is gone are not overwritten, and one line says what to do."""
    (made_home / "pg.json").unlink()
    with pytest.raises(EmbeddedServerError, match=r"pg.json, which held the password, is gone: restore it"):
        embedded.ensure_running()


@as_root
@pytest.mark.parametrize("size", ["16m", "48m"])
def test_a_full_disk_is_told_in_one_line(empty_home, size):
    """When the disk is full while the programs are copied, or the database is made, one line says so."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=711", "orch-test", empty_home.parent]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("this container may not mount a small disk")
    try:
        with pytest.raises(EmbeddedServerError, match=r"No space left on device|free disk space") as raised:
            embedded.ensure_running()
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400
        assert [path.name for path in empty_home.glob("pg*-*")] == (["pgsql-18"] if size == "48m" else [])
        assert not list(empty_home.glob("pg/data*"))
    finally:
        subprocess.run(["umount", empty_home.parent], check=True)


def test_orch_db_start_status_url_stop(made_home):
    """The commands say what they did, hide the password unless asked, and status is one JSON object."""
    from orchestrator.cli.db import command

    def orch_db(*arguments):
        done = CliRunner().invoke(command, arguments)
        assert done.exit_code == 0, done.output
        return done

    password = password_of(made_home)
    stopped = orch_db("status")
    assert stopped.stdout.startswith("stopped\n")
    assert json.loads(orch_db("status", "--json").stdout)["running"] is False
    started = orch_db("start")
    assert started.stdout.startswith("started, for this machine only\npostgresql://orch:***@127.0.0.1:")
    assert "next:" in started.stderr
    found = json.loads(orch_db("status", "--json").stdout)
    assert (found["running"], found["listen"], found["data_dir"]) == (True, None, str(made_home / "pg/data"))
    assert found["size_bytes"] > 10_000_000
    assert password not in started.output + orch_db("status").output + orch_db("url").output + json.dumps(found)
    assert query(orch_db("url", "--show-password").stdout.strip(), "select 1") == [(1,)]
    assert orch_db("stop").stdout == "stopped\n"
    assert orch_db("stop").stdout == "it was not running\n"
