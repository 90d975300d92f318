"""Real trainers forked by a real nursery: how trials end, and that nothing is ever left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator import wire
from orchestrator.launcher import Outcome
from tests.runs import wait_for
from tests.trainers import MARK, Playground, StubLeader

ROOT = Path(__file__).parents[2]

LEFTOVERS = {
    "loader workers": """
        import torch
        from torch.utils.data import DataLoader
        loader = DataLoader(list(range(8)), num_workers=2, persistent_workers=True)
        KEPT.append((loader, list(loader)))
    """,
    "a subprocess": """
        import subprocess
        subprocess.Popen(["sleep", "1000"])
    """,
    "a daemon": """
        import os
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                import signal
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        os.wait()
    """,
}
FOREVER = """
    def objective(trial):
        trial.report(1.0, 1)
        while True:
            pass
"""


def leaving(*kinds: str, end: str = "return 1.0") -> str:
    """An objective that starts such processes, and then ends."""
    bodies = "".join(LEFTOVERS[kind].replace("\n        ", "\n    ") for kind in kinds)
    return f"KEPT = []\ndef objective(trial):{bodies}\n    trial.report(1.0, 1)\n    {end}\n"


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
    """The environment of a trainer holds nothing that opens the database, hides GPUs it was not given, and its job's."""
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
    with actor:
        assert actor.stdout is not None
        assert actor.stdout.readline() == b"report\n"
        assert len(playground.processes()) >= 7  # actor, nursery, trainer, two loader workers, two sleeps
        actor.kill()
    playground.close()


def test_a_nursery_that_died(other):
    """A nursery that is killed, during a trial or between two, is replaced at the next launch."""
    leader = StubLeader()

    def kill(trainer) -> None:
        assert leader.reported.wait(60)
        psutil.Process(psutil.Process(trainer.pid).ppid()).kill()

    with other_mark(other):
        outcome = other.run(FOREVER, leader, kill)
        assert outcome.kind == "crash"
        assert other.run("def objective(trial):\n    return 2.0\n").values == (2.0,)
        nursery = other.nursery_process()
        nursery.kill()
        wait_for(lambda: not nursery.is_running() or nursery.status() == psutil.STATUS_ZOMBIE, "the nursery is dead")
        assert other.run("def objective(trial):\n    return 3.0\n").values == (3.0,)


@contextlib.contextmanager
def other_mark(playground: Playground):
    """A nursery that is started again carries the same mark."""
    os.environ[MARK] = playground.mark
    try:
        yield
    finally:
        del os.environ[MARK]


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


def test_a_deaf_nursery(other):
    """Ctrl-C and SIGTERM in the terminal do not reach the nursery, which has a session of its own."""
    other.nursery.wait()
    process = other.nursery_process()
    assert os.getsid(process.pid) != os.getsid(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert other.run("def objective(trial):\n    return 1.0\n").values == (1.0,)
    assert other.nursery.cold is None
