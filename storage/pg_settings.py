"""What is kept of the private PostgreSQL server between starts, and the configuration made of it."""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import random
import socket
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from storage.errors import EmbeddedServerError
from storage.pg_process import DATABASE, ROLE
from storage.url import StorageUrl

LOOPBACK = "127.0.0.1"
ANY = "*"

# Below the ports that Linux gives to outgoing connections, one of which could sit on ours after a reboot.
_PORTS = range(15432, 25432)

_CONFIG = """\
# Written by `orch` at each start of the server.
listen_addresses = '{listen}'
port = {port}
hba_file = '{hba}'
unix_socket_directories = ''
max_connections = 200
shared_buffers = 128MB
password_encryption = 'scram-sha-256'
timezone = 'UTC'
log_timezone = 'UTC'
log_line_prefix = '%m [%p] '
log_checkpoints = off
# Parallel queries need /dev/shm, which is small in containers and full of data loaders' batches; ours are short.
max_parallel_workers = 0
# A node that vanished must not hold its connection, and what is locked by it, for two hours.
tcp_keepalives_idle = 60
tcp_keepalives_interval = 10
tcp_keepalives_count = 6
"""


@dataclass(frozen=True)
class Settings:
    """What a start needs to know; `listen` is None, an address of this machine, or `*` for all of them."""

    port: int
    password: str = field(repr=False)
    listen: str | None = None
    host: str = ""  # the machine that started the server last: the folder may be shared between machines

    def url(self) -> str:
        """Return the URL by which this machine, and the others if the server listens to them, reach it."""
        host = {None: LOOPBACK, ANY: _own_address()}.get(self.listen, self.listen)
        return StorageUrl(DATABASE, ROLE, self.password, host, self.port).render("postgresql")

    def addresses(self) -> list[str]:
        """Return what the server listens on, as PostgreSQL wants it."""
        if self.listen is None:
            return [LOOPBACK]
        return [ANY] if self.listen == ANY else [LOOPBACK, self.listen]


def read_settings(home: Path) -> Settings | None:
    """Return the settings, or None before the first start.

    Raises:
        EmbeddedServerError: the file cannot be read.
    """
    path = home / "pg.json"
    try:
        return Settings(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except PermissionError:
        raise EmbeddedServerError(
            f"{path} belongs to another user: "
            "set ORCH_HOME to a folder of your own, or ORCH_STORAGE to that server's URL"
        ) from None
    except (ValueError, TypeError):
        raise EmbeddedServerError(f"{path} is damaged: restore it, or move {home} away to start afresh") from None


def write_settings(home: Path, settings: Settings) -> None:
    """Keep the settings for later commands of this user, and nobody else's eyes: they hold the password."""
    _replace(home / "pg.json", json.dumps(asdict(settings), indent=2) + "\n", 0o600)


def write_config(home: Path, settings: Settings) -> Path:
    """Write the server's configuration, which holds no secret, and return where.

    It lies outside the folder of the server's user, so that a server that was broken into cannot rewrite it.
    """
    hba, config = home / "pg_hba.conf", home / "pg.conf"
    others = "" if settings.listen is None else f"host all {ROLE} all scram-sha-256\n"
    _replace(hba, f"# Written by `orch`.\nhost all {ROLE} {LOOPBACK}/32 scram-sha-256\n{others}", 0o644)
    text = _CONFIG.format(listen=",".join(settings.addresses()), port=settings.port, hba=str(hba).replace("'", "''"))
    _replace(config, text, 0o644)
    return config


def read_listen(listen: str) -> str | None:
    """Turn what `--listen` says into what `Settings.listen` holds.

    Raises:
        EmbeddedServerError: it is no address of this machine.
    """
    if listen in (ANY, "0.0.0.0", "::"):
        return ANY
    if listen in (LOOPBACK, "localhost", "::1"):
        return None
    try:
        # As a number: a name could mean another address at the next start.
        found = socket.getaddrinfo(listen, None, type=socket.SOCK_STREAM)
        _bind(str(found[0][4][0]), 0)
    except (OSError, UnicodeError, IndexError):
        raise EmbeddedServerError(
            f"{listen} is no address of this machine: choose one of `hostname -I`, or *"
        ) from None
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_loopback:
        # Debian's /etc/hosts gives the machine's own name such an address.
        raise EmbeddedServerError(
            f"{listen} is {address}, which only this machine reaches: choose one of `hostname -I`"
        )
    return address


def free_port() -> int:
    """Return a port that nobody listens on.

    Raises:
        EmbeddedServerError: there is none.
    """
    for port in random.sample(_PORTS, 50):
        try:
            _bind("0.0.0.0", port)
        except OSError:
            continue
        return port
    raise EmbeddedServerError("found no free port: choose one with `orch db start --port N`")


def check_port(settings: Settings) -> None:
    """Make sure that the server will be able to listen; by itself it starts without an address it cannot have.

    Raises:
        EmbeddedServerError: another program has the port, or the address is gone.
    """
    for address in settings.addresses():
        try:
            _bind("0.0.0.0" if address == ANY else address, settings.port)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise EmbeddedServerError(
                    f"{address} is no longer an address of this machine: "
                    f"choose one with `orch db start --listen ADDRESS` ({LOOPBACK} closes the server)"
                ) from None
            raise EmbeddedServerError(
                f"port {settings.port} on {address} is taken by another program ({error.strerror}): "
                "end it, or choose another port with `orch db start --port N`"
            ) from None


def _bind(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As PostgreSQL does: what is left of closed connections does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))


def _own_address() -> str:
    """Return the address other machines most likely reach this one by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks for the route
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])


def _replace(path: Path, text: str, mode: int) -> None:
    """Write a file so that readers see the old text or the new one, also after a power cut."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
