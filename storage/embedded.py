"""The private PostgreSQL server of this machine: started by the first command that needs it, for one user.

Under `orch_home()`: `pg.json` (port, password; 0600), `pg.conf` and `pg_hba.conf` (written at each start),
`pgsql-N` (the programs), `pg.lock`, and `pg` (0700, of the server's user) with the data and `server.log`.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from storage import pg_process
from storage.errors import EmbeddedServerError
from storage.paths import orch_home
from storage.pg_binaries import prepare
from storage.pg_settings import (
    LOOPBACK,
    Settings,
    check_port,
    free_port,
    read_listen,
    read_settings,
    write_config,
    write_settings,
)
from storage.url import redact

_LOG_LIMIT_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class Started:
    """What a start did; the URL holds the password."""

    url: str
    did: Literal["started", "restarted", "was running"]
    listen: str | None


@dataclass(frozen=True)
class ServerStatus:
    """What is known of the server; all but `running` and `data_dir` may be missing before its first start."""

    running: bool
    pid: int | None
    host: str | None
    port: int | None
    listen: str | None
    url: str | None  # without the password
    data_dir: str
    version: str | None
    size_bytes: int | None


def ensure_running() -> str:
    """Return the URL, with password, of the private server; it is created and started if need be.

    Raises:
        EmbeddedServerError: it cannot be started.
    """
    home = orch_home()
    with _plain_errors(home):
        settings = read_settings(home)
        found = pg_process.postmaster(home / "pg/data")
        if settings is not None and found is not None and found.ready:
            _trim_log(home / "pg/server.log")
            return settings.url()
    return start().url


def start(listen: str | None = None, port: int | None = None) -> Started:
    """Start the server; `listen` and `port` are kept for later starts, and restart a server that runs without them.

    Args:
        listen: an address of this machine on which to let other machines in, `*` for all, 127.0.0.1 for none.
        port: the TCP port.

    Raises:
        EmbeddedServerError: it cannot be started, or not like this.
    """
    if port is not None and not 1024 <= port <= 65535:
        raise EmbeddedServerError(f"port {port} is not possible: choose one from 1024 to 65535")
    home = orch_home()
    pg = home / "pg"
    data = pg / "data"
    with _plain_errors(home), _locked(home):
        kept = read_settings(home)
        wanted = _wanted(home, kept, listen, port)
        running = pg_process.wait_for_ready(data)
        if running and kept is not None and (kept.port, kept.listen) == (wanted.port, wanted.listen):
            return Started(wanted.url(), "was running", wanted.listen)
        if not running:
            _check_host(data, kept)
        if not running or (kept is not None and kept.port != wanted.port):
            check_port(wanted)  # before anything is changed for it
        user, programs = _prepare(home)
        if not data.exists():
            # The password is on disk before it is needed: a kill in between loses no database.
            write_settings(home, wanted)
            pg_process.initialise(programs, user, pg, wanted.password)
        if running:
            pg_process.stop(programs, user, data)
        try:
            check_port(wanted)
            config = write_config(home, wanted)
            write_settings(home, wanted)
            pg_process.start(programs, user, pg, config)
        except EmbeddedServerError:
            if kept is not None:
                write_settings(home, replace(kept, host=wanted.host))
            raise
        return Started(wanted.url(), "restarted" if running else "started", wanted.listen)


def stop() -> bool:
    """Disconnect everybody and stop the server; False if it was not running.

    Raises:
        EmbeddedServerError: it does not stop.
    """
    home = orch_home()
    data = home / "pg/data"
    with _plain_errors(home), _locked(home):
        if not pg_process.wait_for_ready(data):
            _check_host(data, read_settings(home))
            return False
        user = pg_process.server_user(home / "pg")
        pg_process.stop(prepare(home, _version(data)), user, data)
        return True


def status() -> ServerStatus:
    """Look at the server, without starting it.

    Raises:
        EmbeddedServerError: it is another user's.
    """
    home = orch_home()
    data = home / "pg/data"
    with _plain_errors(home):
        settings = read_settings(home)
        found = pg_process.postmaster(data)
        if found is None:
            _check_host(data, settings)
        version = _version(data)
        return ServerStatus(
            running=found is not None,
            pid=found.pid if found else None,
            host=LOOPBACK if settings else None,
            port=settings.port if settings else None,
            listen=settings.listen if settings else None,
            url=redact(settings.url()) if settings else None,
            data_dir=str(data),
            version=str(version) if version else None,
            size_bytes=_size(data) if version else None,
        )


@contextmanager
def _plain_errors(home: Path) -> Iterator[None]:
    """Say in one line what the system refused: a full disk, a folder that may not be read."""
    try:
        yield
    except OSError as error:
        raise EmbeddedServerError(
            f"the private PostgreSQL server cannot use {error.filename or home} ({error.strerror}): "
            "mend that, or set ORCH_HOME to another folder, or ORCH_STORAGE to a server's URL"
        ) from error


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Let one command at a time copy, create, start or stop."""
    handle = os.open(home / "pg.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _wanted(home: Path, kept: Settings | None, listen: str | None, port: int | None) -> Settings:
    if kept is None:
        if (home / "pg/data").exists():
            raise EmbeddedServerError(
                f"{home}/pg.json, which held the password, is gone: "
                f"restore it, or move {home}/pg away to start with an empty database"
            )
        kept = Settings(port=port or free_port(), password=secrets.token_urlsafe(24))
    return replace(
        kept,
        port=port or kept.port,
        listen=kept.listen if listen is None else read_listen(listen),
        host=socket.gethostname(),
    )


def _check_host(data: Path, kept: Settings | None) -> None:
    """Refuse to start a second server on a folder that two machines share: that would destroy the data."""
    if kept is not None and kept.host != socket.gethostname() and (data / "postmaster.pid").exists():
        raise EmbeddedServerError(
            f"the server of {data.parent} runs on {kept.host}: set ORCH_STORAGE to its URL or ORCH_HOME to a folder of "
            f"this machine; only if {kept.host} is gone for good, delete {data / 'postmaster.pid'}"
        )


def _prepare(home: Path) -> tuple[pwd.struct_passwd, Path]:
    """Make the server's folder, and return its user and its programs."""
    if not Path("/proc/self/cwd").exists():
        raise EmbeddedServerError("the private server needs Linux with /proc: set ORCH_STORAGE to a server's URL")
    if set(str(home)) & set("\"'`$\\\n"):
        raise EmbeddedServerError(f"PostgreSQL cannot live in {home}: set ORCH_HOME to a folder with a plain name")
    pg = home / "pg"
    user = pg_process.server_user(pg)
    pg_process.check_can_enter(home, user)
    if not pg.exists():
        pg.mkdir(0o700)
        if os.geteuid() == 0:
            os.chown(pg, user.pw_uid, user.pw_gid)
    return user, prepare(home, _version(pg / "data"))


def _version(data: Path) -> int | None:
    """Return the major version that made the data, None if there are none."""
    try:
        return int((data / "PG_VERSION").read_text())
    except (FileNotFoundError, ValueError):
        return None


def _trim_log(log: Path) -> None:
    """Empty the log of a server that has run for long: whatever fills it must not fill the disk."""
    with suppress(OSError):
        if log.lstat().st_size > _LOG_LIMIT_BYTES:
            # The server's user owns that folder: a link planted there must not lead root elsewhere.
            handle = os.open(log, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.ftruncate(handle, 0)
            finally:
                os.close(handle)


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a running server deletes files
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return total
