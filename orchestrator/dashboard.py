"""optuna-dashboard on a threaded server of this process: quiet, and without the one button that loses a definition."""

from __future__ import annotations

import errno
import http.client
import io
import ipaddress
import json
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

import optuna_dashboard

from storage import open_database, open_storage
from storage.errors import OrchError
from storage.url import redact_text

DEFAULT_PORT = 8080
PORTS_TRIED = 100
ANSWER_TIMEOUT_S = 30
POLL_S = 0.1
ENDS = (signal.SIGINT, signal.SIGTERM)
EVERYWHERE = ("0.0.0.0", "::")
RENAME = re.compile(r"/api/studies/[^/]+/rename/*")
# The page shows what stands under "reason".
NO_RENAME = (
    "orch cannot rename a study, because the dashboard would copy its trials and delete it with its definition and "
    "attempts: create a new study under the new name instead"
)


class DashboardError(OrchError):
    """The dashboard cannot be served where it was asked for."""


class Complaints(io.StringIO):
    """Where errors of requests go: one line each on stderr, as the page asks again and again and tracebacks pile up."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._last = ""

    def flush(self) -> None:
        """Print why a request failed, in one line, unless that is the line that was printed last."""
        said = self.getvalue()
        self.seek(0)
        self.truncate()
        # Whoever complains is handling an exception, and Optuna's own message of a lost database is a wrong guess.
        error = sys.exception()
        while error is not None and (cause := error.__cause__):
            error = cause
        if error is not None:
            said = f"{type(error).__name__}: {error}"
        line = redact_text(said.strip().partition("\n")[0], self._url)
        if line and line != self._last:
            print(f"orch: the dashboard could not answer: {line}", file=sys.stderr, flush=True)
            self._last = line


class Handler(WSGIRequestHandler):
    """Answers a request without logging it."""

    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the page asks every few seconds."""

    def get_stderr(self) -> io.StringIO:
        """Where the WSGI application's errors go."""
        return self.server.complaints


class Server(ThreadingMixIn, WSGIServer):
    """A thread per request; bound, and listening, when it is made."""

    daemon_threads = True  # a request that hangs must not keep the process
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.complaints = Complaints("")
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind without asking the name server for this machine's name, as the standard library does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say in one line what broke; browsers that go away in the middle are normal."""
        if not isinstance(sys.exception(), ConnectionError):
            self.complaints.flush()

    def address(self) -> str:
        """The page's URL, as it is reached from where the server listens."""
        host = socket.gethostname() if self.server_name in EVERYWHERE else self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/dashboard/"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server on `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int | None) -> Server:
    """Listen on `port`, or on the first free one from DEFAULT_PORT on.

    Raises:
        DashboardError: the port is taken, or `host` is no address of this machine.
    """
    last = port or DEFAULT_PORT + PORTS_TRIED - 1
    for candidate in range(port or DEFAULT_PORT, last + 1):
        try:
            return Server(host, candidate)
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise DashboardError(f"{host} is no address of this machine: leave --host out") from None
            if error.errno != errno.EADDRINUSE:
                raise DashboardError(
                    f"cannot listen on {host} port {candidate} ({error.strerror}): give another --port"
                ) from None
    if port is None:
        raise DashboardError(f"the ports {DEFAULT_PORT} to {last} are all taken: give a free one with --port")
    raise DashboardError(f"port {port} is taken: give another --port, or leave it out")


def build_app(url: str, complaints: Complaints) -> WSGIApplication:
    """The dashboard of a database whose schema is built if it is missing.

    Raises:
        StorageError: the database cannot be opened.
    """
    open_database(url).close()
    log = logging.getLogger("optuna_dashboard")
    handler = logging.StreamHandler(complaints)
    handler.setLevel(logging.ERROR)
    log.addHandler(handler)
    log.propagate = False
    return refuse_rename(optuna_dashboard.wsgi(open_storage(url)))


def refuse_rename(app: WSGIApplication) -> WSGIApplication:
    """Let everything through but a rename."""

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # Decoded like the dashboard does before it routes, so that no spelling of the path gets past.
        path = environ.get("PATH_INFO", "").encode("latin-1").decode("utf-8", "ignore")
        if not RENAME.fullmatch(path):
            return app(environ, start_response)
        # An unread body would reset the connection, and the answer with it.
        environ["wsgi.input"].read(min(int(environ.get("CONTENT_LENGTH") or 0), 1 << 20))
        body = json.dumps({"reason": NO_RENAME}).encode()
        start_response("403 Forbidden", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
        return [body]

    return guarded


def serve(server: Server, url: str, ready: Callable[[str], None]) -> int:
    """Serve until SIGINT or SIGTERM, and return its number; `ready` is called with the page's URL once that answers.

    Raises:
        StorageError: the database cannot be opened.
        DashboardError: the server does not answer.
    """
    server.complaints = Complaints(url)
    server.set_app(build_app(url, server.complaints))
    caught: list[int] = []
    before = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in ENDS}
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="dashboard")
    thread.start()
    try:
        _check_answers(server)
        ready(server.address())
        # No lock or event here: a signal handler that finds it held by the thread that it interrupted waits for ever.
        while not caught:
            time.sleep(POLL_S)
        return caught[0]
    finally:
        server.shutdown()
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_answers(server: Server) -> None:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.server_name, server.server_name)
    with closing(http.client.HTTPConnection(host, server.server_port, timeout=ANSWER_TIMEOUT_S)) as connection:
        try:
            connection.request("GET", "/dashboard/")
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise DashboardError(
                f"the dashboard does not answer at {server.address()} ({error}): start it again"
            ) from None
    if status != http.client.OK:
        raise DashboardError(
            f"the dashboard answers HTTP {status} at {server.address()}: see `orch doctor` for the database"
        )
