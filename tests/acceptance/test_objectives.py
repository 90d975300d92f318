"""An ordinary Optuna objective runs unchanged, on one rank or several, and the study stays Optuna's."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
from optuna.trial import TrialState

from storage import open_storage
from tests.runs import Orch, wait_for

# A file of the user's that is called like one of our packages, and imports a sibling.
PLAIN = """
import optuna
from sibling import target

def objective(trial):
    x = trial.suggest_float("x", -5, 5)
    kind = trial.suggest_categorical("kind", ["a", "b"])
    units = trial.suggest_int("units", 1, 64, log=True)
    for step in range(1, 10):
        value = (x - target) ** 2 + (kind == "b") + 1 / step
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned()
    trial.set_user_attr("seen", [trial.number, kind, units])
    return value
"""

# Two ranks that talk to Optuna in different orders, exchange a tensor, and write down what they saw.
RANKS = """
import json, os
import optuna
import torch
import torch.distributed as dist

def objective(trial):
    if trial.rank == 0:
        x = trial.suggest_float("x", 0, 1)
        y = trial.suggest_int("y", 0, 2**40)
    else:
        y = trial.suggest_int("y", 0, 2**40)
        x = trial.suggest_float("x", 0, 1)
    total = torch.tensor([x], dtype=torch.float64)
    dist.all_reduce(total)
    steps = []
    try:
        for step in range(1, 7):
            steps.append(step)
            # odd trials go above the threshold at step 4
            trial.report(2.0 if trial.number % 2 and step >= 4 else 0.5, step)
            if trial.should_prune():
                raise optuna.TrialPruned()
    finally:
        seen = {"x": x, "y": y, "total": total.item(), "steps": steps, "world": dist.get_world_size()}
        seen["pid"] = os.getpid()
        with open(os.path.join(trial.settings["out"], f"{trial.number}-{trial.rank}.json"), "w") as file:
            json.dump(seen, file)
    return x
"""


def test_an_unmodified_optuna_objective_runs_and_its_study_stays_a_plain_optuna_study(orch: Orch) -> None:
    """A plain objective file trains on two Workers to its exact budget, and plain Optuna reads the study."""
    orch.write("sibling.py", "target = 1.5\n")
    orch.write("storage.py", PLAIN)
    orch.ok(
        "study",
        "create",
        "x",
        "--objective",
        "./storage.py:objective",
        "--n-trials",
        "14",
        "--max-steps",
        "9",
        "--seed",
        "3",
    )
    done = orch.run("pool", "start", "x", "--cpu", "2")
    assert done.returncode == 0, done.stderr
    assert "14 of 14 trials" in done.stderr

    study = optuna.load_study(study_name="x", storage=open_storage(orch.url))
    trials = study.trials
    assert [trial.number for trial in trials] == list(range(14))
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    assert any(trial.state is TrialState.PRUNED for trial in trials)
    for trial in trials:
        assert sorted(trial.intermediate_values) == list(range(1, trial.last_step + 1))
        if trial.state is TrialState.COMPLETE:
            assert trial.user_attrs["seen"] == [trial.number, trial.params["kind"], trial.params["units"]]
            assert trial.value == trial.intermediate_values[9]
    best = orch.json("study", "best", "x")
    assert (best["number"], best["value"]) == (study.best_trial.number, study.best_value)

    again = orch.run("pool", "start", "x", "--cpu", "2")
    assert again.returncode == 0
    assert len(study.trials) == 14, "a finished study must not grow"
    study.optimize(lambda trial: trial.suggest_float("x", -5, 5) ** 2, n_trials=1)
    assert len(orch.json("trial", "list", "x")) == 15, "a plain script's trial belongs to the same study"
    orch.nothing_left()


def test_two_ranks_share_parameters_and_verdicts_and_leave_nothing_behind(orch: Orch, tmp_path: Path) -> None:
    """Two gloo ranks see the same parameters, report once a step, and leave together at the step that prunes."""
    out = tmp_path / "out"
    out.mkdir()
    orch.write("ranks.py", RANKS)
    orch.ok(
        "study", "create", "two", "--objective", "ranks.py:objective", "--n-trials", "4", "--gpus-per-trial", "2",
        "--pruner", "threshold:upper=1.0", "--set", f"out={out}",
    )  # fmt: skip
    done = orch.run("pool", "start", "two", "--cpu", "2")
    assert done.returncode == 0, done.stderr
    trials = orch.json("trial", "list", "two")
    assert [trial["state"] for trial in trials] == ["COMPLETE", "PRUNED", "COMPLETE", "PRUNED"]
    for trial in trials:
        ranks = [json.loads((out / f"{trial['number']}-{rank}.json").read_text()) for rank in (0, 1)]
        assert ranks[0]["pid"] != ranks[1]["pid"]
        for rank in ranks:
            assert {"x": rank["x"], "y": rank["y"]} == trial["params"]
            assert rank["total"] == 2 * trial["params"]["x"]
            assert rank["world"] == 2
            assert rank["steps"] == list(range(1, 5 if trial["number"] % 2 else 7))
        shown = orch.json("trial", "show", "two", str(trial["number"]))
        assert sorted(map(int, shown["intermediate_values"])) == ranks[0]["steps"]
    orch.nothing_left()


def test_the_rank_that_failed_first_is_the_error_of_the_trial(orch: Orch) -> None:
    """When rank 1 raises or vanishes, rank 0 is stopped in its collective and rank 1's end is recorded."""
    orch.write(
        "broken.py",
        """
import os
import torch
import torch.distributed as dist

def objective(trial):
    trial.suggest_float("x", 0, 1)
    if trial.rank == 1 and trial.number == 0:
        raise RuntimeError("rank one gave up")
    if trial.rank == 1 and trial.number == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))
    return 1.0
""",
    )
    orch.ok(
        "study", "create", "b", "--objective", "broken.py:objective", "--n-trials", "3", "--gpus-per-trial", "2",
        "--pruner", "none",
    )  # fmt: skip
    done = orch.run("pool", "start", "b", "--cpu", "2")
    trials = {trial["number"]: trial for trial in orch.json("trial", "list", "b")}
    assert trials[0]["state"] == "FAIL"
    assert trials[0]["end_reason"] == "error"
    assert "rank one gave up" in orch.ok("trial", "show", "b", "0")
    assert "rank one gave up" in done.stderr
    assert "rank1.log" in done.stderr
    assert trials[1]["end_reason"] == "crash"
    assert "rank 1 left with exit code 3" in orch.ok("trial", "show", "b", "1")
    assert trials[2]["state"] == "COMPLETE", "the next trial starts on the same gang"
    orch.nothing_left()


def test_a_killed_member_of_a_gang_costs_no_trial(orch: Orch) -> None:
    """SIGKILL of the Worker that lends its rank: the gang is started again, and the same trial goes on."""
    orch.write(
        "pair.py",
        """
import os, time
import torch.distributed as dist

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    trial.report(x, 1)
    while not os.path.exists(trial.settings["go"]):
        time.sleep(0.02)
    dist.barrier()
    return x
""",
    )
    orch.ok(
        "study", "create", "p", "--objective", "pair.py:objective", "--n-trials", "1", "--gpus-per-trial", "2",
        "--pruner", "none", "--set", f"go={orch.folder / 'go'}",
    )  # fmt: skip
    pool = orch.start("pool", "start", "p", "--cpu", "2")
    wait_for(lambda: [t for t in orch.json("trial", "list", "p") if t["last_step"] == 1], "the trial trains")
    leader = orch.json("trial", "show", "p", "0")["attempts"][0]["pid"]
    workers = [process for process in orch.processes() if process.cmdline()[0].startswith("ray::Worker")]
    next(process for process in workers if process.pid != leader).kill()
    wait_for(lambda: len(orch.json("trial", "show", "p", "0")["attempts"]) == 2, "a second attempt", 90.0)
    (orch.folder / "go").touch()
    _, said = pool.communicate(timeout=120)
    assert pool.returncode == 0, said
    trial = orch.json("trial", "show", "p", "0")
    assert trial["state"] == "COMPLETE"
    assert [attempt["end_reason"] for attempt in trial["attempts"]] == ["lost", "done"]
    orch.nothing_left()
