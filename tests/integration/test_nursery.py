"""Real trainers forked by a real nursery: how trials end, and that nothing is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator import spec, wire
from orchestrator.here import run_here
from orchestrator.launcher import Outcome
from orchestrator.leader import TrialLeader
from orchestrator.session import Machine, StudySession
from storage import attempts, open_database, studies
from storage.attempts import NotTaken, Owner
from tests.runs import wait_for
from tests.trainers import FOREVER, LEFTOVERS, MARK, Playground, StubLeader, leaving

ROOT = Path(__file__).parents[2]
OWNER = Owner("w", "here", 1, "boot/1/1/1")


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    """A warm nursery of a parent that has the database's URL in its environment."""
    playground = Playground(tmp_path_factory.mktemp("nursery"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORCH_STORAGE", "postgresql://secret")
        patch.setenv("PGPASSWORD", "secret")
        playground.start()
    yield playground
    playground.close()


@pytest.fixture
def other(tmp_path):
    """Another nursery, which a test may break."""
    playground = Playground(tmp_path)
    playground.start()
    yield playground
    playground.close()


def test_complete(playground):
    """What the objective returns is the outcome, exactly, and its questions were answered in order."""
    leader = StubLeader()
    text = """
        def objective(trial):
            lr = trial.suggest_float("lr", 0, 1)
            trial.report(lr, 1)
            assert not trial.should_prune()
            return 0.1 + 0.2
    """
    assert playground.run(text, leader) == Outcome("complete", (0.1 + 0.2,))
    assert [message["op"] for message in leader.messages] == ["suggest", "report", "should_prune"]


def test_several_values(playground):
    """A study with two directions gets two values."""
    text = "def objective(trial):\n    return 1, float('inf')\n"
    outcome = playground.run(text, directions=["MINIMIZE", "MAXIMIZE"])
    assert outcome == Outcome("complete", (1.0, float("inf")))


def test_pruned(playground):
    """An objective that follows a verdict is pruned."""
    text = """
        import optuna
        def objective(trial):
            trial.report(1.0, 1)
            if trial.should_prune():
                raise optuna.TrialPruned
    """
    assert playground.run(text, StubLeader(prune=True)).kind == "pruned"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no data')", "ValueError: no data"),
        ("raise SystemExit", "SystemExit"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("trial.report('x', 1)", "TypeError: report(value=...) takes a float"),
        ("trial.study.tell(0)", "AttributeError: trial.study.tell is not available while training"),
    ],
)
def test_errors(playground, body, said):
    """Whatever the objective raises, also sys.exit, is an error whose traceback begins in the user's file."""
    outcome = playground.run(f"def objective(trial):\n    {body}\n")
    assert outcome.kind == "error", outcome
    first, second = outcome.error.splitlines()[:2]
    assert first == "Traceback (most recent call last):"
    assert second.strip().startswith(f'File "{playground.folder}/objective_')
    assert said in outcome.error.splitlines()[-1]


def test_an_error_while_importing(playground):
    """A module that raises when it is imported is an error whose traceback begins in the user's file."""
    outcome = playground.run("raise RuntimeError('no licence')\n")
    assert outcome.kind == "error"
    assert outcome.error.splitlines()[1].strip().startswith(f'File "{playground.folder}/objective_')
    assert outcome.error.endswith("RuntimeError: no licence")


@pytest.mark.parametrize("value", ["None", "'high'", "(1, 2)", "[[1]]"])
def test_results_that_are_no_number(playground, value):
    """An objective that returns no float is an error that shows what it returned."""
    outcome = playground.run(f"def objective(trial):\n    return {value}\n")
    assert outcome.kind == "error"
    assert "the objective" in outcome.error.splitlines()[-1]


def test_refused(playground):
    """What no trial of the study can survive is told apart from an error, in one sentence."""
    outcome = playground.run("def objective(trial):\n    trial.suggest_categorical('c', [CH])\nCH = (1, 2)\n")
    assert outcome.kind == "refused"
    assert outcome.error.startswith("parameter 'c': the choice (1, 2) is a tuple")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(3)", "left with exit code 3"),
        ("os._exit(0)", "left with exit code 0"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "killed by signal 15"),
        ("import ctypes; ctypes.string_at(0)", "killed by signal 11"),
    ],
)
def test_crashes(playground, body, said):
    """A trainer that is gone without a word is a crash, with its exit code or signal; its output is kept."""
    text = f"import os, signal\ndef objective(trial):\n    print('last words {said}')\n    {body}\n"
    outcome = playground.run(text)
    assert outcome.kind == "crash"
    assert said in outcome.error
    assert f"last words {said}" in (playground.folder / "log" / "rank0.log").read_text()


def test_stop(playground):
    """`stop` from another thread ends a trainer that listens to nobody."""
    leader = StubLeader()

    def stop(trainer) -> None:
        assert leader.reported.wait(60)
        trainer.stop()

    assert playground.run(FOREVER, leader, stop).kind == "stopped"


def test_stop_before_it_starts(playground):
    """A trainer that is stopped before its job arrives does not run it to the end."""
    trainer = playground.nursery.launch()
    trainer.stop()
    outcome = trainer.serve(playground.job(playground.write("forever.py", FOREVER)), StubLeader().answer)
    trainer.bury()
    assert outcome.kind == "stopped"
    assert playground.left_behind() == []


def test_cancelled(playground):
    """A trial that is not the Worker's any more ends its trainer at its next question."""

    class Gone(StubLeader):
        def answer(self, message):
            return None

    assert playground.run(FOREVER, Gone()).kind == "cancelled"


@pytest.mark.parametrize("kind", LEFTOVERS)
def test_nothing_is_left(playground, kind):
    """What a trial has started is gone when the trial is, also in a session of its own (see Playground.run)."""
    assert playground.run(leaving(kind)).kind == "complete"


@pytest.mark.parametrize("end", ["raise ValueError", "import os; os._exit(1)", "while True: pass"])
def test_nothing_is_left_of_other_ends(playground, end):
    """Nothing is left either of a trial that failed, crashed or was stopped."""
    leader = StubLeader()

    def stop(trainer) -> None:
        assert leader.reported.wait(60)
        if end.startswith("while"):
            trainer.stop()

    kind = playground.run(leaving(*LEFTOVERS, end=end), leader, stop).kind
    assert kind == {"r": "error", "i": "crash", "w": "stopped"}[end[0]]


def test_every_trial_is_fresh(playground):
    """The second trial of a file sees nothing of what the first one did to its modules and its environment."""
    text = """
        import os, random
        import warm
        COUNT = []
        def objective(trial):
            COUNT.append(1)
            warm.SEEN = getattr(warm, "SEEN", 0) + 1
            os.environ["SEEN"] = os.environ.get("SEEN", "") + "x"
            return len(COUNT) + warm.SEEN + len(os.environ["SEEN"])
    """
    path = playground.write("fresh.py", text)
    assert [playground.run_file(path).values for _ in range(2)] == [(3.0,), (3.0,)]


def test_one_seed_one_trial(playground):
    """Python, NumPy and torch are seeded by the trial's seed."""
    text = """
        import random, numpy, torch
        def objective(trial):
            return random.random() + numpy.random.rand() + torch.rand(1).item()
    """
    values = [playground.run(text, seed=seed).values for seed in (1, 1, 2**32 - 1)]
    assert values[0] == values[1] != values[2]


def test_output(playground):
    """What the objective and its children print goes to the log of the rank, in order."""
    text = """
        import subprocess, sys
        def objective(trial):
            print("one")
            print("two", file=sys.stderr)
            subprocess.run(["echo", "three"], check=True)
            return 1.0
    """
    playground.run(text, log_path=str(playground.folder / "deep" / "output"))
    assert (playground.folder / "deep" / "output" / "rank0.log").read_text() == "one\ntwo\nthree\n"


def test_no_secrets(playground):
    """The environment of a trainer has nothing that opens the database, no GPUs, and what its job adds."""
    text = """
        import os
        def objective(trial):
            trial.set_user_attr("env", dict(os.environ))
            return 1.0
    """
    leader = StubLeader()
    playground.run(text, leader)
    environment = leader.attributes["env"]
    assert not [name for name in environment if name.startswith(("PG", "ORCH_STORAGE"))]
    assert "secret" not in str(environment)
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["ORCH_ATTEMPT"]) == ("", "token")


def test_facts(playground):
    """Number, parameters, settings, seed, attributes, device and CPUs of the trial are those of the job."""
    text = """
        import torch
        def objective(trial):
            lr = trial.suggest_float("lr", 0, 1)
            facts = [trial.number, trial.params, trial.settings, trial.seed, trial.user_attrs, trial.device]
            facts += [trial.rank, trial.world_size, trial.num_cpus, torch.get_num_threads(), str(trial.datetime_start)]
            trial.set_user_attr("facts", facts)
            return lr
    """
    leader = StubLeader()
    lr = ['{"name": "FloatDistribution", "attributes": {"step": null, "low": 0, "high": 1, "log": false}}', 1 / 3]
    changes = {"params": {"lr": lr}, "settings": {"epochs": 3}, "user_attrs": {"by": "me"}, "num_cpus": 2}
    outcome = playground.run(text, leader, datetime_start="2026-01-02T03:04:05", **changes)
    assert outcome.values == (1 / 3,)
    facts = [7, {"lr": 1 / 3}, {"epochs": 3}, 12, {"by": "me"}, "cpu", 0, 1, 2, 2, "2026-01-02 03:04:05"]
    assert leader.attributes["facts"] == facts


def test_the_worker_survives_a_runaway_message(playground, monkeypatch):
    """A trainer that sends more than a message may hold ends its trial as a failure, and not its Worker."""
    monkeypatch.setattr(wire, "MAX_LINE", 10_000)
    outcome = playground.run("def objective(trial):\n    trial.set_user_attr('x', 'x' * 1_000_000)\n    return 1.0\n")
    assert outcome.failed


def test_the_actors_death_takes_all_along(tmp_path):
    """When the process that holds the nursery is killed, nursery, trainer and all that they started go."""
    playground = Playground(tmp_path)
    objective = playground.write("busy.py", leaving(*LEFTOVERS, end="import time; time.sleep(1000)"))
    script = (
        "import sys, tests.trainers as t, pathlib\n"
        f"p = t.Playground(pathlib.Path({str(tmp_path)!r}))\n"
        "class Leader(t.StubLeader):\n"
        "    def answer(self, message):\n"
        "        print(message['op'], flush=True)\n"
        "        return super().answer(message)\n"
        f"p.run_file(pathlib.Path({str(objective)!r}), Leader())\n"
    )
    actor = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, MARK: playground.mark},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert actor.stdout is not None
        assert actor.stdout.readline() == b"report\n"
        # The actor, the nursery, the trainer, two loader workers and two sleeps.
        wait_for(lambda: len(playground.processes()) >= 7, "the trial has started everything")
    finally:
        actor.kill()
        actor.communicate()
    playground.close()


def test_a_nursery_that_died(other):
    """A nursery that is killed, during a trial or between two, is replaced at the next launch."""
    leader = StubLeader()

    def kill(trainer) -> None:
        assert leader.reported.wait(60)
        psutil.Process(psutil.Process(trainer.pid).ppid()).kill()

    with other.marked():
        outcome = other.run(FOREVER, leader, kill)
        assert outcome.kind == "crash"
        assert other.run("def objective(trial):\n    return 2.0\n").values == (2.0,)
        nursery = other.nursery_process()
        nursery.kill()
        wait_for(lambda: not nursery.is_running() or nursery.status() == psutil.STATUS_ZOMBIE, "the nursery is dead")
        assert other.run("def objective(trial):\n    return 3.0\n").values == (3.0,)


def test_a_module_with_threads_is_not_forked(tmp_path):
    """A module that starts a thread when imported is left to the trainers, the reason is told, and trials run."""
    text = """
        import threading
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        def objective(trial):
            return float(threading.active_count())
    """
    playground = Playground(tmp_path, text)
    playground.start()
    try:
        assert playground.run_file(playground.warm).values == (2.0,)
        assert playground.nursery.cold == "its module starts threads when imported"
        assert playground.run_file(playground.warm).values == (2.0,)
        assert psutil.Process(playground.nursery_process().pid).num_threads() == 1
    finally:
        playground.close()


def test_a_deaf_nursery(playground):
    """Ctrl-C and SIGTERM in the terminal do not reach the nursery, which has a session of its own."""
    playground.nursery.wait()
    process = playground.nursery_process()
    assert os.getsid(process.pid) != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert playground.run("def objective(trial):\n    return 1.0\n").values == (1.0,)
    assert playground.nursery.cold is None


RESUMING = """
    def objective(trial):
        lr = trial.suggest_float("lr", 0, 1)
        saved = trial.checkpoint.load() or {"step": 0}
        trial.set_user_attr("resumed_from", saved["step"])
        for step in range(saved["step"] + 1, 6):
            trial.checkpoint.save({"step": step}, step)
            trial.report(lr + step, step)
            if step == 3 and saved["step"] == 0:
                trial.report(0.0, 1000)
                while True:
                    pass
        return lr
"""


@pytest.fixture
def session(database_url, tmp_path, monkeypatch):
    """A study on PostgreSQL, and orch's folders under tmp_path."""
    monkeypatch.setenv("ORCH_HOME", str(tmp_path / "home"))
    study = spec.parse({"name": "s", "objective": "f.py:objective", "seed": 1, "n_trials": 2, "max_steps": 9})
    database = open_database(database_url)
    assert studies.create(database, "s", ["MINIMIZE"], study.to_json(), {}, 2)
    database.close()
    session = StudySession(database_url, "s", str(tmp_path / "logs"), str(tmp_path / "checkpoints"))
    yield session
    session.close()
    session.study._storage._backend.engine.dispose()


def led(playground: Playground, session: StudySession, objective: Path, folder: Path, stop_at: int | None = None):
    """Take the next trial, train it in the nursery under its real leader, settle it."""
    leader = session.take(OWNER)
    assert isinstance(leader, TrialLeader)
    job = session.job(leader, f"{objective}:objective", str(folder))
    job |= {"rank": 0, "world_size": 1, **Machine("here", None, 1).job(leader.taken.token)}
    trainer = playground.nursery.launch()

    def answer(message):
        reply = leader.answer(0, message)
        if message["op"] == "report" and message["step"] == stop_at:
            trainer.stop()
        return reply

    outcome = trainer.serve(job, answer)
    trainer.release()
    trainer.bury()
    return session.settle(leader, outcome)


def test_a_trial_goes_on_from_its_checkpoint(playground, session, tmp_path):
    """A trial that was stopped goes on with its number, parameters and curve up to the checkpoint, in a new attempt."""
    objective = playground.write("resuming.py", RESUMING)
    assert led(playground, session, objective, tmp_path, stop_at=1000) == {"event": "given_back", "trial": 0}
    params = session.study.trials[0].params
    event = led(playground, session, objective, tmp_path)
    assert (event["event"], event["trial"], event["state"], event["steps"]) == ("settled", 0, "COMPLETE", 5)
    trial = session.study.trials[0]
    assert (trial.params, trial.value, trial.user_attrs) == (params, params["lr"], {"resumed_from": 3})
    assert trial.intermediate_values == {step: params["lr"] + step for step in range(1, 6)}
    assert [a.end_reason for a in attempts.of_study(session.database, session.study_id)] == ["drained", "done"]


def test_a_crash_is_settled(playground, session, tmp_path):
    """A trainer that crashes makes its trial FAIL, with the reason and the log in the event."""
    objective = playground.write("crashing.py", "import os\ndef objective(trial):\n    print('bye')\n    os._exit(9)\n")
    event = led(playground, session, objective, tmp_path)
    assert (event["state"], event["reason"], event["value"]) == ("FAIL", "crash", None)
    assert "exit code 9" in event["error"]
    assert Path(event["log_path"]).read_text() == "bye\n"


@pytest.fixture
def foreground(monkeypatch):
    """A trial in this process changes its environment and torch's threads: put them back."""
    import torch

    threads, environment = torch.get_num_threads(), dict(os.environ)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


def here(session: StudySession, folder: Path, text: str):
    path = folder / "here.py"
    path.write_text(text)
    return run_here(session.database.url, "s", f"{path}:objective", str(folder))


def test_a_trial_in_the_foreground(session, tmp_path, foreground, capsys):
    """`run_here` trains one trial in this process, prints where it is, and settles it with its reports."""
    text = "def objective(trial):\n    trial.report(0.5, 1)\n    print('here')\n"
    text += "    return trial.suggest_float('x', 0, 1)\n"
    event = here(session, tmp_path, text)
    trial = session.study.trials[0]
    assert (event["state"], event["value"], event["steps"]) == ("COMPLETE", trial.params["x"], 1)
    assert (trial.value, trial.intermediate_values) == (trial.params["x"], {1: 0.5})
    assert capsys.readouterr().out == "here\n"


def test_an_error_in_the_foreground(session, tmp_path, foreground):
    """An objective that raises in the foreground is a FAIL with its traceback, and the budget then ends."""
    event = here(session, tmp_path, "def objective(trial):\n    1 / 0\n")
    assert (event["state"], event["reason"]) == ("FAIL", "error")
    assert event["error"].splitlines()[1].strip().startswith(f'File "{tmp_path}/here.py", line 2')
    studies.set_desired(session.database, session.study_id, "stopped")
    assert here(session, tmp_path, "") is NotTaken.STOPPED


def test_ctrl_c_in_the_foreground(session, tmp_path, foreground):
    """Ctrl-C goes through, and gives the trial back."""
    with pytest.raises(KeyboardInterrupt):
        here(session, tmp_path, "def objective(trial):\n    trial.report(0.5, 1)\n    raise KeyboardInterrupt\n")
    trial = session.study.trials[0]
    assert (trial.state.name, trial.intermediate_values) == ("WAITING", {})
    assert [a.end_reason for a in attempts.of_study(session.database, session.study_id)] == ["drained"]


@pytest.mark.parametrize(
    "question",
    [
        {"op": "set_user_attr", "key": "k" * 600, "value": 1},
        {"op": "set_user_attr", "key": "a\0b", "value": 1},
        {"op": "set_user_attr", "key": 5, "value": 1},
        {"op": "study_set_user_attr", "key": "k" * 600, "value": 1},
        {"op": "suggest", "name": "x" * 600, "distribution": '{"name": "IntDistribution", "attributes": '
         '{"step": 1, "low": 0, "high": 1, "log": false}}'},
    ],
    ids=lambda question: f"{question['op']} {str(question.get('key'))[:5]!r}",
)  # fmt: skip
def test_what_the_columns_cannot_hold(session, question):
    """A name that Optuna's columns cannot hold is the objective's error, and does not take the Worker down."""
    leader = session.take(OWNER)
    assert "error" in leader.answer(0, question)
    assert leader.answer(0, {"op": "report", "value": 1.0, "step": 1}) == {"ok": None}
