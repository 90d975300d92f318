"""Reads and redacts storage URLs: what users may write, and how SQLAlchemy and psycopg2 want it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, quote, quote_plus, unquote, urlsplit

from storage.errors import StorageError

UNREADABLE = "<unreadable URL>"
HIDDEN = "***"

_SCHEMES = ("postgresql", "postgres", "postgresql+psycopg2")
_SECRET_OPTIONS = ("password", "sslpassword")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True)
class StorageUrl:
    """The parts of a storage URL, decoded; a `host` that starts with / is the folder of a unix socket."""

    database: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    host: str | None = None
    port: int | None = None
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def render(self, scheme: str, hide: bool = False) -> str:
        """Write the URL again, passwords as `***` if `hide`."""
        options = list(self.options)
        host = self.host or ""
        if host.startswith("/"):
            # SQLAlchemy knows a socket's folder only as an option.
            options.insert(0, ("host", host))
            host = ""
        text = f"{scheme}://"
        if self.user is not None or self.password is not None:
            text += quote(self.user or "", safe="")
            if self.password is not None:
                text += ":" + (HIDDEN if hide else quote(self.password, safe=""))
            text += "@"
        text += f"[{host}]" if ":" in host else host
        if self.port is not None and host:
            text += f":{self.port}"
        elif self.port is not None:
            options.append(("port", str(self.port)))
        text += "/" + quote(self.database, safe="")
        # %20 and not +, which libpq takes for a plus sign.
        pairs = [
            f"{quote(key, safe='')}={HIDDEN if hide and _is_secret(key) else quote(value, safe='/')}"
            for key, value in options
        ]
        return text + ("?" + "&".join(pairs) if pairs else "")


def parse(url: str) -> StorageUrl:
    """Read a storage URL.

    Raises:
        StorageError: it is no PostgreSQL URL, or cannot be read; the message never holds the password.
    """
    scheme, found, rest = url.partition("://")
    if not found or scheme.lower() not in _SCHEMES:
        named = f", not {scheme}://" if found and re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme) else ""
        raise StorageError(
            f"the storage URL must start with postgresql://{named}: postgresql://USER@HOST:PORT/DATABASE"
        )
    if _CONTROL.search(unquote(url)):
        raise StorageError("the storage URL holds a line break or another control character: remove it")
    try:
        parts = urlsplit(f"{scheme}://{rest}", allow_fragments=False)
        port = parts.port
    except ValueError:
        # The message of urllib quotes what stands there, and that may be the end of a password.
        raise StorageError(
            "the storage URL has no readable port: write a number from 1 to 65535, "
            "and percent-encode / : @ ? # [ ] in the password"
        ) from None
    if port == 0:
        raise StorageError("the storage URL has port 0: write a number from 1 to 65535")
    database = unquote(parts.path.removeprefix("/"))
    if not database:
        raise StorageError("the storage URL names no database: postgresql://USER@HOST:PORT/DATABASE")
    if "@" in database or "/" in database:
        raise StorageError(
            "the storage URL cannot be read: percent-encode / : @ ? # [ ] in user, password and database"
        )
    if scheme.lower() == "postgresql+psycopg2":
        options = parse_qsl(parts.query, keep_blank_values=True)
    else:
        # In a libpq URL, + is a plus sign; only SQLAlchemy writes it for a blank.
        options = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)
    if len({key for key, _ in options}) < len(options):
        raise StorageError("the storage URL gives an option twice: keep one of them")
    userinfo, _, address = parts.netloc.rpartition("@")
    user, colon, password = userinfo.partition(":")
    return StorageUrl(
        database=database,
        user=unquote(user) or None,
        password=unquote(password) if colon else None,
        host=_host(address),
        port=port,
        options=tuple(options),
    )


def redact(url: str) -> str:
    """Return the URL with its passwords as `***`, or `<unreadable URL>`; never raises."""
    try:
        return parse(url).render("postgresql", hide=True)
    except Exception:
        return UNREADABLE


def sqlalchemy_url(url: str) -> str:
    """Return the URL for Optuna and Alembic; a plain postgresql:// would mean psycopg 3 to SQLAlchemy.

    Raises:
        StorageError: see parse.
    """
    return parse(url).render("postgresql+psycopg2")


def psycopg2_dsn(url: str) -> str:
    """Return the URL for psycopg2.connect.

    Raises:
        StorageError: see parse.
    """
    return parse(url).render("postgresql")


def is_loopback(url: str) -> bool:
    """Whether the URL's server can be reached from its own machine only.

    Raises:
        StorageError: see parse.
    """
    host = parse(url).host or ""
    return host in ("", "localhost", "::1") or host.startswith(("/", "127."))


def redact_text(text: str, url: str) -> str:
    """Remove the URL's passwords, plain and percent-encoded, from a message; never raises."""
    text = text.replace(url, redact(url)) if url else text
    # What stands between the first : and the last @ is secret even where the URL cannot be read.
    raw = re.search(r"://[^:@/]*:(.*)@", url, re.DOTALL)
    secrets = {raw[1], unquote(raw[1])} if raw else set()
    try:
        parsed = parse(url)
    except StorageError:
        pass
    else:
        secrets |= {parsed.password or ""} | {value for key, value in parsed.options if _is_secret(key)}
    secrets |= {encode(secret) for secret in secrets for encode in (quote, quote_plus, lambda s: quote(s, safe=""))}
    for secret in sorted(secrets - {""}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text


def _is_secret(option: str) -> bool:
    return option.lower() in _SECRET_OPTIONS


def _host(address: str) -> str | None:
    """Return the host of HOST, HOST:PORT or [IPV6]:PORT, spelled as it was written."""
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    return unquote(host) or None
