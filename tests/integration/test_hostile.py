"""Objectives that interrupt, close, replace or quote what they should not: each costs a trial at most."""

from __future__ import annotations

import math
from pathlib import Path

import optuna
import pytest

from orchestrator.launcher import Outcome
from orchestrator.session import StudySession
from storage import open_database, studies
from storage.attempts import Owner
from tests.trainers import Playground, StubLeader

OWNER = Owner("w", "here", 1, "boot/1/1/1")
FLOAT = '{"name": "FloatDistribution", "attributes": {"step": null, "low": 0.0, "high": %s, "log": false}}'


@pytest.fixture(scope="module")
def playground(tmp_path_factory):
    playground = Playground(tmp_path_factory.mktemp("nursery"))
    playground.start()
    yield playground
    playground.close()


class Echo(StubLeader):
    """Answers each parameter with the number in its name, so that a mixed-up answer shows."""

    def answer(self, message):
        reply = super().answer(message)
        return {"ok": float(message["name"])} if message["op"] == "suggest" else reply


def test_a_timeout_inside_a_question_does_not_mix_up_answers(playground):
    """An objective whose signal handler raises in the middle of a question gets the right answer to the next one."""
    text = """
        import signal
        class Timeout(Exception):
            pass
        armed = False
        def ring(number, frame):
            if armed:
                raise Timeout
        def objective(trial):
            global armed
            signal.signal(signal.SIGALRM, ring)
            interrupted = 0
            for index in range(600):
                try:
                    armed = True
                    signal.setitimer(signal.ITIMER_REAL, 0.00005)
                    value = trial.suggest_float(str(index), 0, 1000)
                    armed = False
                    assert value == index, (value, index)
                except Timeout:
                    armed = False
                    interrupted += 1
            return float(interrupted)
    """
    outcome = playground.run(text, Echo())
    assert outcome.kind == "complete", outcome
    assert outcome.values[0] > 0, "some question must have been interrupted"


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.stdout.close(); sys.stderr.close()",
        "import os; os.close(1); os.close(2)",
        "import sys; sys.stdout = sys.stderr = None",
        "import sys; sys.stdout = object()",
    ],
)
def test_an_objective_may_do_what_it_likes_with_its_output(playground, body):
    """A trial whose stdout was closed or replaced still says how it ended."""
    assert playground.run(f"def objective(trial):\n    {body}\n    return 2.0\n").values == (2.0,)
    broken = playground.run(f"def objective(trial):\n    {body}\n    raise ValueError('really')\n")
    assert (broken.kind, "ValueError: really" in broken.error) == ("error", True)


def test_a_module_that_replaces_stdout_when_imported(tmp_path):
    """A module that puts its own object in the place of stdout can be trained, warm."""
    text = """
        import sys
        class Tee:
            def write(self, text): return len(text)
            def flush(self): pass
        sys.stdout = Tee()
        def objective(trial):
            print("hello")
            return 1.0
    """
    playground = Playground(tmp_path, text)
    playground.start()
    try:
        assert playground.run_file(playground.warm).values == (1.0,)
        assert playground.nursery.cold is None
    finally:
        playground.close()


def test_a_process_that_the_module_starts_is_not_taken_for_a_leftover(tmp_path):
    """A helper process started when the module is imported serves every trial: the trainers import it themselves."""
    text = """
        import multiprocessing
        shared = multiprocessing.get_context("fork").Manager().dict()
        def objective(trial):
            shared["x"] = 1.0
            return shared["x"]
    """
    playground = Playground(tmp_path, text)
    playground.start()
    try:
        for _ in range(2):
            assert playground.run_file(playground.warm).values == (1.0,)
        assert playground.nursery.cold in (
            "its module starts processes when imported",
            "its module starts threads when imported",
        )
    finally:
        playground.close()


@pytest.fixture
def session(database_url, tmp_path):
    spec = {"name": "s", "objective": "f.py:f", "direction": ["minimize"], "pruner": "none", "seed": 1}
    database = open_database(database_url)
    assert studies.create(database, "s", ["MINIMIZE"], spec, {}, None) is not None
    database.close()
    session = StudySession(database_url, "s", str(tmp_path / "logs"), str(tmp_path / "checkpoints"))
    yield session
    session.close()


def test_what_the_sampler_cannot_do_is_the_objectives_error(session):
    """A range that the sampler chokes on fails the trial, and the next question is answered."""
    leader = session.take(OWNER)
    reply = leader.answer(0, {"op": "suggest", "name": "x", "distribution": FLOAT % "Infinity"})
    assert reply["error"] == "ValueError"
    assert leader.answer(0, {"op": "suggest", "name": "y", "distribution": FLOAT % "1.0"})["ok"] <= 1.0


def test_an_error_text_that_the_database_cannot_hold_is_spelled_out(session):
    """NUL and lone surrogates in an exception's message do not keep the trial from ending."""
    leader = session.take(OWNER)
    event = session.settle(leader, Outcome("error", error="bad \0 path \udcff"))
    assert (event["state"], event["error"]) == ("FAIL", "bad \\0 path \\udcff")


def test_an_enqueued_value_that_is_no_choice_fails_its_own_trial_only(session):
    """A wrong enqueued value is the trial's error; a study whose choices changed would be refused for every trial."""
    session.study.enqueue_trial({"c": "zzz"})
    leader = session.take(OWNER)
    choices = '{"name": "CategoricalDistribution", "attributes": {"choices": ["a", "b"]}}'
    assert leader.answer(0, {"op": "suggest", "name": "c", "distribution": choices})["error"] == "ValueError"
    session.settle(leader, Outcome("error", error="wrong"))
    leader = session.take(OWNER)
    assert not math.isnan(leader.answer(0, {"op": "suggest", "name": "c", "distribution": choices})["ok"])
    session.settle(leader, Outcome("complete", (1.0,)))
    leader = session.take(OWNER)
    changed = choices.replace('"b"', '"c"')
    assert leader.answer(0, {"op": "suggest", "name": "c", "distribution": changed})["error"] == "Refused"
    assert len(optuna.load_study(study_name="s", storage=session.study._storage).trials) == 3


def test_a_fork_of_the_trial_cannot_ask_and_takes_no_answers(playground):
    """A forked child that asks the trial gets an error of its own; the parent's answers stay right."""
    text = """
        import os
        def objective(trial):
            child = os.fork()
            try:
                values = [trial.suggest_float(str(index), 0, 1000) for index in range(200)]
            except RuntimeError:
                os._exit(5)
            assert values == list(range(200))
            return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert playground.run(text, Echo()).values == (5.0,)


@pytest.mark.parametrize("pruned", [True, False])
def test_a_rank_may_ask_for_a_verdict_more_than_rank_0(session, pruned):
    """When rank 0 has ended, a verdict it never asked for is how it ended, and nobody waits for it."""
    leader = session.take(OWNER)
    leader.rank_0_ended(pruned)
    assert leader.answer(1, {"op": "should_prune", "call": 0}) == {"ok": pruned}
    leader.end()
    assert leader.answer(1, {"op": "should_prune", "call": 1}) is None


def test_two_databases_on_one_machine_keep_their_files_apart(session, empty_database_url, tmp_path):
    """The first studies of two databases have the same id, and never the same folder."""
    spec = session.spec.to_json()
    database = open_database(empty_database_url)
    assert studies.create(database, "s", ["MINIMIZE"], spec, {}, None) is not None
    database.close()
    other = StudySession(empty_database_url, "s", str(tmp_path / "logs"), str(tmp_path / "checkpoints"))
    mine, theirs = session.take(OWNER), other.take(OWNER)
    assert session.study_id == other.study_id
    assert mine.taken.number == theirs.taken.number
    folders = [
        Path(s.job(leader, "f", "/")["checkpoint_folder"]).parent for s, leader in ((session, mine), (other, theirs))
    ]
    for folder in folders:
        folder.mkdir(parents=True)
    session.settle(mine, Outcome("error", error="x"))
    assert [folder.exists() for folder in folders] == [False, True]
    other.close()
