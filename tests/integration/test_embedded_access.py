"""Who gets into the private PostgreSQL server, its folders and its password, and who does not."""

import os
import pwd
from pathlib import Path

import psycopg2
import pytest
from embedded_homes import (
    as_root,
    child,
    command_lines,
    eventually,
    mode,
    needs_network,
    own_address,
    password_of,
    query,
)

from storage import embedded
from storage.errors import EmbeddedServerError, OrchError
from storage.paths import orch_home

pytest_plugins = ("embedded_homes",)


@as_root
def test_a_folder_the_server_cannot_enter_is_named_and_left_as_it_is(empty_home):
    """A closed parent folder is one line with its name, and no permission is loosened."""
    closed = empty_home.parent
    closed.chmod(0o700)
    with pytest.raises(EmbeddedServerError, match=f"may not enter {closed}: set ORCH_HOME .*") as raised:
        embedded.ensure_running()
    assert "\n" not in str(raised.value)
    assert mode(closed) == 0o700
    assert not (empty_home / "pg").exists()


def test_everything_is_readable_by_those_who_need_it_only(empty_home):
    """The data are the server user's alone, the password the orch user's alone, and no folder above is touched."""
    above = {path: mode(path) for path in (Path("/"), Path("/tmp"), Path("/root"), empty_home.parent)}
    embedded.ensure_running()
    server = empty_home.joinpath("pg").stat().st_uid
    me = os.geteuid()
    assert (server != me) == (me == 0)
    assert mode(empty_home) == (0o711 if me == 0 else 0o700)
    assert empty_home.stat().st_uid == me
    assert {name: mode(empty_home / name) for name in ("pg", "pg/data")} == {"pg": 0o700, "pg/data": 0o700}
    assert {path.lstat().st_uid for path in (empty_home / "pg").rglob("*")} == {server}
    assert not [path for path in (empty_home / "pg").rglob("*") if mode(path) & 0o077]
    outside = [path for path in empty_home.rglob("*") if empty_home / "pg" not in (path, *path.parents)]
    assert {path.stat().st_uid for path in outside} == {me}
    assert not [path for path in outside if mode(path) & 0o022]
    assert (mode(empty_home / "pg.json"), mode(empty_home / "pg.lock")) == (0o600, 0o600)
    assert {path: mode(path) for path in above} == above


def test_an_existing_home_keeps_its_mode(empty_home):
    """ORCH_HOME that exists is used as it is; one that is a file is one line."""
    empty_home.mkdir(0o750)
    assert orch_home() == empty_home
    assert mode(empty_home) == 0o750
    empty_home.rmdir()
    empty_home.touch()
    with pytest.raises(OrchError, match="is not a folder: set ORCH_HOME to one"):
        orch_home()


def test_only_the_password_lets_in(made_home):
    """A wrong password, none, or the name of the server's superuser is refused, and orch is no superuser."""
    url = embedded.ensure_running()
    password = password_of(made_home)
    for wrong in (
        url.replace(password, "wrong"),
        url.replace(f":{password}", ""),
        url.replace("//orch:", "//postgres:").replace("/orch", "/postgres"),
    ):
        with pytest.raises(psycopg2.OperationalError, match=r"password|pg_hba"):
            psycopg2.connect(wrong)
    assert query(url, "select rolsuper from pg_roles where rolname = current_user") == [(False,)]
    query(url, "create schema mine")


def test_the_password_shows_up_nowhere(empty_home, monkeypatch):
    """From creation to running no process has the password in its arguments, nor the log or a file but pg.json."""
    monkeypatch.setenv("ORCH_STORAGE", "postgresql://ann:hunter2@db/studies")
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    seen = set()
    process = child()
    eventually(lambda: seen.update(command_lines()) or process.poll() is not None)
    url, errors = process.communicate()
    assert process.returncode == 0, errors
    seen.update(command_lines())
    password = password_of(empty_home)
    assert f":{password}@" in url
    assert [line for line in seen if b"--single" in line], "did not look while it was created"
    assert not [line for line in seen if password.encode() in line]
    with pytest.raises(psycopg2.OperationalError):
        psycopg2.connect(url.strip().replace(password, "wrong"))
    holders = [path for path in empty_home.rglob("*") if path.is_file() and password.encode() in path.read_bytes()]
    assert holders == [empty_home / "pg.json"]
    environment = Path(f"/proc/{embedded.status().pid}/environ").read_bytes()
    assert b"hunter2" not in environment
    assert password.encode() not in environment


@needs_network
def test_listen_opens_and_closes_the_server(made_home):
    """By default only this machine gets in; --listen ADDRESS lets others in with the password, for later starts too."""
    address = own_address()
    url = embedded.ensure_running()
    outside = url.replace("127.0.0.1", address)
    with pytest.raises(psycopg2.OperationalError, match="refused"):
        psycopg2.connect(outside)

    opened = embedded.start(listen=address)
    assert (opened.did, opened.url, opened.listen) == ("restarted", outside, address)
    assert query(outside, "select host(inet_client_addr())") == [(address,)]
    assert query(url, "select 1") == [(1,)]
    with pytest.raises(psycopg2.OperationalError, match="password authentication failed"):
        psycopg2.connect(outside.replace(password_of(made_home), "wrong"))

    embedded.stop()
    assert embedded.ensure_running() == outside
    assert embedded.status().listen == address
    assert embedded.start(listen="*").did == "restarted"
    assert embedded.start().did == "was running"
    assert query(outside, "select 1") == [(1,)]

    assert embedded.start(listen="127.0.0.1").url == url
    with pytest.raises(psycopg2.OperationalError, match="refused"):
        psycopg2.connect(outside)


def test_listen_on_what_is_not_ours_is_refused(made_home):
    """An address of another machine, or no address at all, is one line, and the server runs on."""
    embedded.ensure_running()
    before = embedded.status().pid
    for wrong in ("198.51.100.7", "no such host", "127.0.0.1,*", "'"):
        with pytest.raises(EmbeddedServerError, match="is no address of this machine"):
            embedded.start(listen=wrong)
    assert embedded.status().pid == before


def test_the_log_of_a_long_run_is_emptied(made_home, monkeypatch):
    """A log beyond the limit is emptied by the next command, and a link in its place is not followed."""
    url = embedded.ensure_running()
    log = made_home / "pg/server.log"
    assert log.stat().st_size > 0
    monkeypatch.setattr(embedded, "_LOG_LIMIT_BYTES", 100)
    embedded.ensure_running()
    assert log.stat().st_size == 0
    with pytest.raises(psycopg2.errors.SyntaxError):
        query(url, "nonsense")
    assert "nonsense" in log.read_text()
    precious = made_home / "precious"
    precious.write_text("x" * 1000)
    log.unlink()
    log.symlink_to(precious)
    embedded.ensure_running()
    assert precious.stat().st_size == 1000


@as_root
def test_an_ordinary_user_gets_a_server_of_their_own(empty_home):
    """A user who is not root runs the server as themselves, in a home that nobody else may enter."""
    nobody = pwd.getpwnam("nobody")
    os.chown(empty_home.parent, nobody.pw_uid, nobody.pw_gid)
    readable, writable = os.pipe()
    # A fork, because that user need not be able to run a Python that lies in root's home.
    if (pid := os.fork()) == 0:
        try:
            os.setgroups([])
            os.setresgid(nobody.pw_gid, nobody.pw_gid, nobody.pw_gid)
            os.setresuid(nobody.pw_uid, nobody.pw_uid, nobody.pw_uid)
            os.write(writable, embedded.ensure_running().encode())
        except BaseException as error:
            os.write(writable, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable) as answer:
        url = answer.read()
    os.waitpid(pid, 0)
    assert query(url, "select 1") == [(1,)]
    assert (mode(empty_home), mode(empty_home / "pg")) == (0o700, 0o700)
    assert {path.lstat().st_uid for path in empty_home.rglob("*")} == {nobody.pw_uid}


@as_root
def test_a_home_of_root_is_refused_to_others(made_home):
    """Another user who is pointed at root's home is told to use their own, or the URL."""
    embedded.ensure_running()
    nobody = pwd.getpwnam("nobody")
    try:
        os.seteuid(nobody.pw_uid)
        with pytest.raises(EmbeddedServerError, match=r"pg.json belongs to another user: set ORCH_HOME"):
            embedded.ensure_running()
    finally:
        os.seteuid(0)
