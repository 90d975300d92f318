"""`orch dashboard`: people see their study in a browser, and nothing is left when they stop it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import optuna
import psycopg2
import pytest
from playwright.sync_api import expect, sync_playwright

from orchestrator import dashboard
from storage import open_storage

ORCH = Path(sys.executable).with_name("orch")
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SECRET = "tr0ub4dor"


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        return probe.getsockname()[1]


def run_dashboard(*arguments):
    return subprocess.run([ORCH, "dashboard", *arguments], capture_output=True, text=True, timeout=60, check=False)


def ask(page, method, path, document=None):
    """One request to the dashboard's server: the status, and the JSON that came back."""
    address = urlsplit(page)
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=30)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, None if document is None else json.dumps(document), headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or "null")


def run_sql(url, statement):
    with closing(psycopg2.connect(url)) as connection, connection, connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.fixture
def study(database_url):
    """A study with finished, pruned and waiting trials, made by plain Optuna."""
    storage = open_storage(database_url)
    study = optuna.create_study(storage=storage, study_name="seen-by-people", direction="minimize")

    def objective(trial):
        x = trial.suggest_float("x", -1, 1)
        for step in (1, 2):
            trial.report(x * x / step, step)
        if trial.number == 3:
            raise optuna.TrialPruned
        return x * x

    study.optimize(objective, n_trials=6)
    study.enqueue_trial({"x": 0.5})
    yield study
    storage.engine.dispose()


@pytest.fixture
def serve():
    """Start `orch dashboard` on a database; gives the process, which leads a group of its own, and its page."""
    started = []

    def start(url):
        process = subprocess.Popen(
            [ORCH, "dashboard", "--port", str(free_port())],
            env={**os.environ, "ORCH_STORAGE": url},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        page = process.stdout.readline().strip()
        assert page, process.stderr.read()
        return process, page

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def browser(tmp_path):
    """A page of a real browser with a profile of its own, and what its console said was wrong."""
    if not CHROMIUM.exists() and not os.environ.get("CI"):
        pytest.skip("no browser on this machine: apt-get install chromium")
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=CHROMIUM, args=FLAGS, viewport={"width": 1400, "height": 1000}
        )
        page = context.pages[0]
        wrong = []
        page.on(
            "console", lambda said: wrong.append(f"{said.text} {said.location['url']}") if said.type == "error" else 0
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        yield page, wrong
        context.close()


def test_people_see_their_study_in_a_browser(database_url, study, serve, browser, tmp_path):
    """The list names the study, a click shows its history as a plot and its trials, and the console has no error."""
    process, address = serve(database_url)
    page, wrong = browser
    page.goto(address)
    page.get_by_text("seen-by-people").first.click()
    expect(page.locator(".js-plotly-plot").first).to_be_visible(timeout=30_000)
    page.screenshot(path=tmp_path / "history.png")
    page.goto(f"{address}studies/{study._study_id}/trials")
    for number in range(7):
        expect(page.get_by_text(f"Trial {number}", exact=True).first).to_be_visible(timeout=30_000)
    page.screenshot(path=tmp_path / "trials.png")
    assert [line for line in wrong if "favicon" not in line] == []
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_everything_it_started(database_url, serve, number, code):
    """Ctrl-C and SIGTERM end the dashboard with their exit code, without a word, and no process of it is left."""
    process, _ = serve(database_url)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (code, "", "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_an_empty_database_is_made_ready_and_shown(empty_database_url, serve):
    """On a database without any table the page answers at once, with no studies; nothing is logged per request."""
    process, address = serve(empty_database_url)
    assert ask(address, "GET", "/api/studies") == (200, {"study_summaries": []})
    process.terminate()
    assert process.communicate(timeout=30) == ("", "")


@pytest.mark.parametrize("spelling", ["rename", "rename/", "ren%FFame"])
def test_a_rename_is_refused_and_the_study_stays(database_url, study, serve, spelling):
    """The dashboard's rename, which would make a new study and delete ours, is answered 403 with one sentence."""
    _, address = serve(database_url)
    status, answer = ask(address, "POST", f"/api/studies/{study._study_id}/{spelling}", {"study_name": "other"})
    assert status == 403
    assert answer == {"reason": dashboard.NO_RENAME}
    _, answer = ask(address, "GET", "/api/studies")
    assert [(found["study_id"], found["study_name"]) for found in answer["study_summaries"]] == [
        (study._study_id, "seen-by-people")
    ]


def test_the_rename_that_is_refused_is_the_only_one_there_is(database_url):
    """The installed optuna-dashboard renames by one route, of the form that is refused."""
    storage = open_storage(database_url)
    rules = [route.rule for route in dashboard.optuna_dashboard.wsgi(storage).routes if "rename" in route.rule]
    storage.engine.dispose()
    assert rules == ["/api/studies/<study_id:int>/rename"]


def test_a_port_that_was_asked_for_and_is_taken_is_refused_in_one_line():
    """With --port, a port in use ends the command with exit 1 before it looks for a database."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        done = run_dashboard("--port", str(port), "--storage", "postgresql://nobody@127.0.0.1:1/none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"orch: port {port} is taken: give another --port, or leave it out\n"


def test_without_a_port_the_next_free_one_is_used():
    """Two dashboards on one machine get two ports, without being told."""
    with dashboard.bind("127.0.0.1", None) as one, dashboard.bind("127.0.0.1", None) as two:
        assert one.server_port != two.server_port
        assert two.server_port in range(dashboard.DEFAULT_PORT, dashboard.DEFAULT_PORT + dashboard.PORTS_TRIED)


def test_a_database_that_is_not_there_is_one_line_without_the_password():
    """Exit 1, one line, no address printed as if it worked, and the password of --storage nowhere."""
    done = run_dashboard("--port", str(free_port()), "--storage", f"postgresql://ann:{SECRET}@127.0.0.1:1/none")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("orch: ")
    assert done.stderr.count("\n") == 1
    assert SECRET not in done.stderr


def test_an_address_that_others_reach_comes_with_a_warning():
    """A --host that others reach prints one warning that there is no authentication; the default prints none."""
    url = "postgresql://nobody@127.0.0.1:1/none"
    open_to_all = run_dashboard("--host", "0.0.0.0", "--port", str(free_port()), "--storage", url)
    assert open_to_all.stderr.count("no authentication") == 1
    assert "no authentication" not in run_dashboard("--port", str(free_port()), "--storage", url).stderr


def test_a_request_that_fails_is_one_line_with_its_cause_and_no_password(capsys):
    """Of a traceback the first cause is said, once while it stays the same, and the password is hidden."""
    complaints = dashboard.Complaints(f"postgresql://ann:{SECRET}@db/studies")
    for _ in range(2):
        try:
            try:
                raise OSError(f"{SECRET} is gone\nand more of it")
            except OSError as cause:
                raise RuntimeError("typically invalid data") from cause
        except RuntimeError:
            complaints.write(traceback.format_exc())
            complaints.flush()
    complaints.flush()
    assert capsys.readouterr().err == "orch: the dashboard could not answer: OSError: *** is gone\n"


def test_a_database_that_goes_away_and_comes_back_is_no_end(database_url, study, serve):
    """While the database cuts everybody off requests fail with one line in all; afterwards they are answered again."""
    process, address = serve(database_url)
    other, name = database_url.rpartition("/")[0] + "/postgres", database_url.rpartition("/")[2]
    run_sql(database_url, f"ALTER DATABASE {name} CONNECTION LIMIT 0")
    run_sql(other, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    assert [ask(address, "GET", "/api/studies")[0] for _ in range(3)] == [500, 500, 500]
    run_sql(other, f"ALTER DATABASE {name} CONNECTION LIMIT -1")
    assert ask(address, "GET", "/api/studies")[0] == 200
    process.terminate()
    _, err = process.communicate(timeout=30)
    assert err.count("\n") == 1
    assert "too many connections" in err
