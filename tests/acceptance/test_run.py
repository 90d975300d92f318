"""`orch init` and `orch run` as a newcomer types them; the same from Python; a definition for an Optuna study."""

from __future__ import annotations

import subprocess
import sys

import optuna
import yaml

from storage import open_storage
from tests.runs import Orch

FINE = "def objective(trial):\n    return trial.suggest_float('x', 0, 1)\n"


def test_a_newcomer_runs_one_trial_here_and_the_rest_in_a_pool(orch: Orch) -> None:
    """`orch init`, `orch run --here` and `orch run` make one study of the template, to its exact budget."""
    orch.ok("init")
    definition = yaml.safe_load((orch.folder / "study.yaml").read_text())
    name = definition["name"]
    here = orch.run("run", "study.yaml", "--here")
    assert here.returncode == 0, here.stderr
    assert [trial["number"] for trial in orch.json("trial", "list", name)] == [0]
    done = orch.run("run", "study.yaml", "--cpu", "2")
    assert done.returncode == 0, done.stderr
    trials = orch.json("trial", "list", name)
    assert len(trials) == definition["n_trials"]
    assert {trial["state"] for trial in trials} == {"COMPLETE", "PRUNED"}
    best = orch.json("study", "best", name)
    assert done.stdout.startswith(f"trial {best['number']}  ")
    assert best["value"] > 0.9
    orch.nothing_left()


def test_a_debugger_can_step_into_a_trial_that_runs_here(orch: Orch) -> None:
    """`orch run --here` calls the objective in the foreground process: pdb reads the terminal and sees the trial."""
    orch.write("study.yaml", "name: s\nobjective: stops.py:objective\npruner: none\nn_trials: 1\n")
    orch.write(
        "stops.py", "def objective(trial):\n    x = trial.suggest_float('x', 0, 1)\n    breakpoint()\n    return x\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "orchestrator.cli", "run", "study.yaml", "--here"],
        cwd=orch.folder,
        env=orch.environment(),
        input="print('value', x == trial.params['x'])\nc\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "value True" in done.stdout
    assert orch.json("trial", "list", "s")[0]["state"] == "COMPLETE"


def test_python_does_the_same_as_the_command_line(orch: Orch) -> None:
    """create_study, run and load_study do from a notebook what the commands do; the study is a normal optuna.Study."""
    orch.write("fine.py", FINE)
    program = """
import optuna, orchestrator
created = orchestrator.create_study("s", objective="fine.py:objective", direction="maximize", n_trials=3,
                                    sampler="random", pruner="median", seed=7)
assert created.is_new
study = orchestrator.run("s", cpu=1)
assert type(study) is optuna.Study
assert type(study.sampler) is optuna.samplers.RandomSampler
assert type(study.pruner) is optuna.pruners.MedianPruner
again = orchestrator.load_study("s")
assert [trial.value for trial in again.trials] == [trial.value for trial in study.trials]
print(len(again.trials), again.best_value == max(trial.value for trial in again.trials))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=orch.folder,
        env=orch.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "True"]
    orch.nothing_left()


def test_an_optuna_study_gets_a_definition_and_its_history_does_not_count(orch: Orch) -> None:
    """`--adopt` keeps the trials of an Optuna study as history for the sampler, and the budget is for new ones."""
    orch.write("fine.py", FINE)
    study = optuna.create_study(study_name="old", storage=open_storage(orch.url), direction="maximize")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=4)
    adopt = (
        "study", "create", "old", "--adopt", "--objective", "fine.py:objective", "--pruner", "none", "--n-trials", "3",
    )  # fmt: skip
    assert "without a definition" in orch.refused(
        *[word for word in adopt if word != "--adopt"], "--direction", "maximize"
    )
    assert "direction" in orch.refused(*adopt)
    orch.ok(*adopt, "--direction", "maximize")
    assert "has a definition already" in orch.refused(*adopt, "--direction", "maximize")
    orch.ok("pool", "start", "old", "--cpu", "1")
    assert len(orch.json("trial", "list", "old")) == 7
    assert "3/3" in orch.ok("study", "show", "old")


def test_adopted_trials_count_when_asked(orch: Orch) -> None:
    """With `--count-existing` the finished trials of an adopted study are part of the budget."""
    orch.write("fine.py", FINE)
    study = optuna.create_study(study_name="old", storage=open_storage(orch.url))
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=4)
    orch.ok(
        "study", "create", "old", "--adopt", "--count-existing", "--objective", "fine.py:objective", "--pruner", "none",
        "--n-trials", "4",
    )  # fmt: skip
    done = orch.run("pool", "start", "old", "--cpu", "1")
    assert done.returncode == 0
    assert len(study.trials) == 4


def test_a_stopped_study_takes_no_trial_until_it_is_resumed(orch: Orch) -> None:
    """`trial.study.stop()` ends the pool after the running trial; the study goes on after `orch study resume`."""
    orch.write(
        "once.py",
        "def objective(trial):\n"
        "    if trial.number == 0:\n"
        "        trial.study.stop()\n"
        "    return trial.suggest_float('x', 0, 1)\n",
    )
    orch.ok("study", "create", "s", "--objective", "once.py:objective", "--pruner", "none", "--n-trials", "3")
    done = orch.run("pool", "start", "s", "--cpu", "1")
    assert done.returncode == 0
    assert "orch study resume s" in done.stderr
    assert [trial["state"] for trial in orch.json("trial", "list", "s")] == ["COMPLETE"]
    orch.ok("study", "resume", "s")
    orch.ok("pool", "start", "s", "--cpu", "1")
    assert len(orch.json("trial", "list", "s")) == 3
