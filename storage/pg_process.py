"""Runs the programs of the private PostgreSQL server, as a user who is not root, and knows whether it is alive."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from storage.errors import EmbeddedServerError

WAIT_S = 60
ROLE = "orch"
DATABASE = "orch"

_ENTER = 'for folder in "$@"; do cd "$folder" 2>/dev/null || { printf %s "$folder"; exit 1; }; done'


@dataclass(frozen=True)
class Postmaster:
    """The living server process of a data folder."""

    pid: int
    ready: bool


def server_user(pg: Path) -> pwd.struct_passwd:
    """Return the user the server runs as: the owner of `pg`, or who is to own it; never root.

    Raises:
        EmbeddedServerError: there is no such user, or the folder is somebody else's.
    """
    wanted = os.environ.get("ORCH_PG_USER")
    try:
        if os.geteuid() != 0:
            user = pwd.getpwuid(os.geteuid())
        elif wanted:
            user = pwd.getpwnam(wanted)
        elif pg.exists():
            user = pwd.getpwuid(pg.stat().st_uid)
        else:
            try:
                user = pwd.getpwnam("postgres")
            except KeyError:
                user = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedServerError(
            f"there is no user {wanted or 'postgres or nobody'} to run the server: set ORCH_PG_USER to one that exists"
        ) from None
    if user.pw_uid == 0:
        raise EmbeddedServerError("PostgreSQL refuses to run as root: set ORCH_PG_USER to another user")
    if pg.exists() and pg.stat().st_uid != user.pw_uid:
        raise EmbeddedServerError(
            f"{pg} belongs to another user than {user.pw_name}: "
            "set ORCH_PG_USER to its owner (as root), or ORCH_HOME to a folder of your own"
        )
    return user


def run(arguments: Sequence[str | Path], user: pwd.struct_passwd, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program as `user` in a bare environment (no passwords, no PG* of the caller), `text` on its stdin.

    Raises:
        EmbeddedServerError: it cannot be run.
    """
    as_root = os.geteuid() == 0
    try:
        return subprocess.run(
            [str(argument) for argument in arguments],
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
            user=user.pw_uid if as_root else None,
            group=user.pw_gid if as_root else None,
            extra_groups=[] if as_root else None,
            umask=0o077,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EmbeddedServerError(
            f"cannot run {arguments[0]} as user {user.pw_name} ({getattr(error, 'strerror', error)}): "
            "set ORCH_HOME to a folder from which that user may run programs"
        ) from None


def check_can_enter(folder: Path, user: pwd.struct_passwd) -> None:
    """Make sure that the server's user reaches `folder`; no permission is loosened for it.

    Raises:
        EmbeddedServerError: it does not; names the folder that is closed.
    """
    done = run(["/bin/sh", "-c", _ENTER, "sh", *reversed(folder.parents), folder], user)
    if done.returncode != 0:
        raise EmbeddedServerError(
            f"user {user.pw_name}, who runs the server, may not enter {done.stdout or folder}: "
            "set ORCH_HOME to a folder it can reach, such as /var/lib/orch"
        )


def initialise(programs: Path, user: pwd.struct_passwd, pg: Path, password: str) -> None:
    """Make `pg`/data, whole or not at all, with a database and a login that owns it.

    The superuser that initdb makes gets no password and cannot connect: a superuser of the server may run programs
    as its system user. The password goes through stdin, so that no argument, file or log ever holds it.

    Raises:
        EmbeddedServerError: initdb failed; with its first error.
    """
    for leftover in pg.glob("data.new-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    # A name of its own: an initdb whose starter was killed may still be writing to the last one.
    fresh = pg / f"data.new-{secrets.token_hex(4)}"
    try:
        made = run(
            [programs / "initdb", "-D", fresh, "--username=postgres", "--auth=reject", "--encoding=UTF8", "--locale=C"],
            user,
        )
        if made.returncode != 0:
            raise EmbeddedServerError(f"cannot make the database in {pg}: {_cause(made.stderr or made.stdout)}")
        quoted = password.replace("'", "''")
        sql = f"CREATE ROLE {ROLE} LOGIN CREATEDB PASSWORD '{quoted}';\nCREATE DATABASE {DATABASE} OWNER {ROLE};\n"
        done = run([programs / "postgres", "--single", "-D", fresh, "postgres"], user, sql)
        if done.returncode != 0 or re.search("ERROR|FATAL|PANIC", done.stderr):
            said = _cause(done.stderr).replace(password, "***")
            raise EmbeddedServerError(f"cannot make the database in {pg}: {said}")
        fresh.rename(pg / "data")
    finally:
        shutil.rmtree(fresh, ignore_errors=True)  # it is there only if something failed, perhaps for want of space


def postmaster(data: Path) -> Postmaster | None:
    """Return the living server of a data folder, by its pid file and /proc: the id alone may be another's by now.

    Raises:
        OSError: the folder may not be read.
    """
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        pid = int(lines[0])
    except (FileNotFoundError, IndexError, ValueError):
        return None
    if pid <= 0 or not _is_server(pid, data):
        return None
    return Postmaster(pid, ready=len(lines) > 7 and lines[7].strip() == "ready")


def start(programs: Path, user: pwd.struct_passwd, pg: Path, config: Path) -> None:
    """Start the server, which must not be running, in a session of its own; wait until it takes connections.

    Raises:
        EmbeddedServerError: it did not start; with the first error in its log.
    """
    data, log = pg / "data", pg / "server.log"
    # What a crash left behind: PostgreSQL would believe it if the process id is in use again.
    (data / "postmaster.pid").unlink(missing_ok=True)
    if log.exists():
        log.replace(pg / "server.log.old")
    options = f"-c config_file={shlex.quote(str(config))}"
    tried = run(
        [programs / "pg_ctl", "start", "-s", "-w", "-t", str(WAIT_S), "-D", data, "-l", log, "-o", options], user
    )
    if tried.returncode != 0:
        if postmaster(data) is not None:
            raise _not_ready(log)
        written = log.read_text(errors="replace") if log.exists() and not log.is_symlink() else ""
        said = _cause(written or tried.stderr)
        raise EmbeddedServerError(f"the PostgreSQL server did not start: {said} (see {log})")


def stop(programs: Path, user: pwd.struct_passwd, data: Path) -> None:
    """Disconnect everybody, and stop the server.

    Raises:
        EmbeddedServerError: it is still there after a minute.
    """
    tried = run([programs / "pg_ctl", "stop", "-s", "-w", "-t", str(WAIT_S), "-m", "fast", "-D", data], user)
    if tried.returncode != 0 and postmaster(data) is not None:
        raise EmbeddedServerError(f"the PostgreSQL server did not stop: {_cause(tried.stderr)}")


def wait_for_ready(data: Path) -> bool:
    """Whether the server runs; waits for one that is starting, stopping, or leaving processes behind after a crash.

    Raises:
        EmbeddedServerError: it is still at it after a minute.
    """
    until = time.monotonic() + WAIT_S
    # A second server beside the processes of the first would destroy the data.
    while (found := postmaster(data)) is not None or _servers(data):
        if found is not None and found.ready:
            return True
        if time.monotonic() > until:
            raise _not_ready(data.parent / "server.log")
        time.sleep(0.05)
    return False


def _not_ready(log: Path) -> EmbeddedServerError:
    return EmbeddedServerError(
        f"the PostgreSQL server is neither up nor gone after {WAIT_S} s: try again, or see {log}"
    )


def _is_server(pid: int, data: Path) -> bool:
    """Whether the process is a PostgreSQL server at work in this folder: each makes it its working directory."""
    try:
        # A process that just ended leaves no `cwd`.
        return (
            Path(f"/proc/{pid}/comm").read_text() == "postgres\n"
            and Path(f"/proc/{pid}/cwd").stat().st_ino == data.stat().st_ino
            and Path(f"/proc/{pid}/cwd").stat().st_dev == data.stat().st_dev
        )
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _servers(data: Path) -> list[int]:
    return [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and _is_server(int(entry.name), data)
    ]


def _cause(said: str) -> str:
    """Return the line that tells why: the first error, of which later ones are consequences, with its hint."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for i, line in enumerate(lines):
        if re.search(r"FATAL|PANIC|ERROR|error:", line):
            hint = next((after.partition("HINT:")[2].strip() for after in lines[i + 1 : i + 3] if "HINT:" in after), "")
            return f"{line} ({hint})" if hint else line
    return lines[-1] if lines else "it said nothing"
