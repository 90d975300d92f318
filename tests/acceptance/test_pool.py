"""A pool through its life: signals, kills, a study deleted under it, secrets, a Ray cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg2
import pytest

from tests.runs import Orch, wait_for

# Ten steps, checkpointed each; after step 2 it waits for the file `go`, so that a test can act in the middle.
SLOW = """
import os, time
import torch

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    state = trial.checkpoint.load()
    first = 1 if state is None else state["step"] + 1
    print("begins at", first, flush=True)
    for step in range(first, 7):
        while step == 3 and not os.path.exists(trial.settings["go"]):
            time.sleep(0.02)
        trial.checkpoint.save({"step": step, "x": x}, step)
        trial.report(x + step, step)
        trial.should_prune()
    return x
"""


@pytest.fixture
def slow(orch: Orch) -> Orch:
    """A study of two slow trials."""
    orch.write("slow.py", SLOW)
    orch.ok(
        "study", "create", "s", "--objective", "slow.py:objective", "--n-trials", "2", "--pruner", "none",
        "--set", f"go={orch.folder / 'go'}",
    )  # fmt: skip
    return orch


def in_the_middle(orch: Orch) -> bool:
    """Whether both trials have reported step 2 and wait."""
    trials = orch.json("trial", "list", "s")
    return [(trial["state"], trial["last_step"]) for trial in trials] == [("RUNNING", 2)] * 2


def states(orch: Orch) -> list[str]:
    return [trial["state"] for trial in orch.json("trial", "list", "s")]


def assert_whole(orch: Orch) -> None:
    """Both trials finished, with a curve that has no gap."""
    for number in (0, 1):
        shown = orch.json("trial", "show", "s", str(number))
        assert shown["state"] == "COMPLETE"
        assert sorted(map(int, shown["intermediate_values"])) == [1, 2, 3, 4, 5, 6]
        x = shown["params"]["x"]
        assert all(value == x + int(step) for step, value in shown["intermediate_values"].items())


def test_one_interrupt_drains_the_pool(slow: Orch) -> None:
    """After one SIGINT the running trials are finished, no new one is taken, and the exit code says interrupted."""
    pool = slow.start("pool", "start", "s", "--cpu", "2")
    wait_for(lambda: in_the_middle(slow), "both trials at step 2")
    os.killpg(pool.pid, signal.SIGINT)  # as the terminal does it: to the whole group
    assert pool.stderr is not None
    wait_for(lambda: "draining" in pool.stderr.readline(), "the pool says that it drains")
    (slow.folder / "go").touch()
    pool.communicate(timeout=60)
    assert pool.returncode == 130
    assert_whole(slow)
    slow.nothing_left()


def test_two_interrupts_give_the_trials_back_and_the_next_pool_goes_on_from_their_checkpoints(slow: Orch) -> None:
    """After two signals no trial is RUNNING; a later pool resumes each from its checkpoint, and no curve has a gap."""
    pool = slow.start("pool", "start", "s", "--cpu", "2")
    wait_for(lambda: in_the_middle(slow), "both trials at step 2")
    before = [trial["params"] for trial in slow.json("trial", "list", "s")]
    pool.send_signal(signal.SIGTERM)
    pool.send_signal(signal.SIGINT)
    pool.communicate(timeout=60)
    assert pool.returncode in (130, 143)
    assert states(slow) == ["WAITING", "WAITING"]
    assert [trial["last_step"] for trial in slow.json("trial", "list", "s")] == [None, None]
    slow.nothing_left()

    (slow.folder / "go").touch()
    slow.ok("pool", "start", "s", "--cpu", "2")
    assert_whole(slow)
    assert [trial["params"] for trial in slow.json("trial", "list", "s")] == before
    attempts = slow.json("trial", "show", "s", "0")["attempts"]
    assert [attempt["end_reason"] for attempt in attempts] == ["drained", "done"]
    assert "begins at 3" in Path(attempts[1]["log_path"], "rank0.log").read_text()
    slow.nothing_left()


def test_a_killed_pool_leaves_no_process_and_its_trials_are_taken_up_again(slow: Orch) -> None:
    """SIGKILL of the driver ends everything it started; the next pool of this machine takes up its trials at once."""
    pool = slow.start("pool", "start", "s", "--cpu", "2")
    wait_for(lambda: in_the_middle(slow), "both trials at step 2")
    pool.kill()
    pool.communicate(timeout=60)
    slow.nothing_left()
    assert states(slow) == ["RUNNING", "RUNNING"]
    (slow.folder / "go").touch()
    slow.ok("pool", "start", "s", "--cpu", "2")
    assert_whole(slow)
    slow.nothing_left()


def test_a_killed_worker_is_replaced_and_its_trial_goes_on(slow: Orch) -> None:
    """SIGKILL of a Ray actor: its trainer dies with it, the pool starts the Worker again and the trial goes on."""
    pool = slow.start("pool", "start", "s", "--cpu", "2")
    wait_for(lambda: in_the_middle(slow), "both trials at step 2")
    psutil.Process(slow.json("trial", "show", "s", "0")["attempts"][0]["pid"]).kill()
    wait_for(lambda: len(slow.json("trial", "show", "s", "0")["attempts"]) == 2, "a second attempt", 90.0)
    (slow.folder / "go").touch()
    _, said = pool.communicate(timeout=120)
    assert pool.returncode == 0, said
    assert "died and is started again" in said
    assert_whole(slow)
    slow.nothing_left()


def test_a_study_deleted_under_a_pool_ends_it_with_one_line(slow: Orch) -> None:
    """Deleting a study ends its pool with one line and exit 1; no process and no row is left."""
    pool = slow.start("pool", "start", "s", "--cpu", "2")
    wait_for(lambda: in_the_middle(slow), "both trials at step 2")
    slow.ok("study", "delete", "s", "--yes")
    (slow.folder / "go").touch()
    _, said = pool.communicate(timeout=60)
    assert pool.returncode == 1, said
    assert [line for line in said.splitlines() if line.startswith("orch: ")] == [
        "orch: study 's' was deleted while the pool ran"
    ]
    assert "/orchestrator/" not in said, "a traceback"
    assert slow.json("study", "list") == []
    connection = psycopg2.connect(slow.url)
    with connection, connection.cursor() as cursor:
        cursor.execute("SELECT (SELECT count(*) FROM trials), (SELECT count(*) FROM orch.attempts)")
        assert cursor.fetchone() == (0, 0)
    connection.close()
    slow.nothing_left()


def test_trials_that_fail_in_a_row_stop_the_pool_with_the_first_cause(orch: Orch) -> None:
    """An objective that always raises stops the pool after --max-failures trials, with one line and exit 1."""
    orch.write("bad.py", "def objective(trial):\n    raise ValueError(f'no data in {trial.number}')\n")
    orch.ok("study", "create", "s", "--objective", "bad.py:objective", "--n-trials", "50", "--pruner", "none")
    line = orch.refused("pool", "start", "s", "--cpu", "1", "--max-failures", "3")
    assert "3 trials failed in a row" in line
    assert "trial 0: ValueError: no data in 0" in line
    assert set(states(orch)) <= {"FAIL", "WAITING"}
    assert "no data in 0" in orch.ok("trial", "show", "s", "0")
    orch.nothing_left()


def test_choices_that_the_database_cannot_keep_end_the_pool_with_one_line(orch: Orch) -> None:
    """A tuple among the choices, made where no check can see it, ends the pool at the first trial with one line."""
    orch.write(
        "choices.py",
        "sizes = [(1, 2), (3, 4)]\ndef objective(trial):\n    return sum(trial.suggest_categorical('size', sizes))\n",
    )
    orch.ok("study", "create", "s", "--objective", "choices.py:objective", "--n-trials", "50", "--pruner", "none")
    line = orch.refused("pool", "start", "s", "--cpu", "1")
    assert "the choice (1, 2) is a tuple" in line
    orch.nothing_left()


def test_the_way_into_the_database_stays_with_the_workers(orch: Orch) -> None:
    """The password is in no command line, no Ray log and no trainer's environment."""
    orch.write(
        "spy.py",
        """
import os
def objective(trial):
    trial.suggest_float("x", 0, 1)
    trial.set_user_attr("environment", sorted(os.environ))
    parents = [open(f"/proc/{pid}/cmdline").read() for pid in os.listdir("/proc") if pid.isdigit()]
    trial.set_user_attr("command_lines", parents)
    return 0.0
""",
    )
    orch.extra["PGAPPNAME"] = "orch-test"
    orch.ok("study", "create", "s", "--objective", "spy.py:objective", "--n-trials", "1", "--pruner", "none")
    done = orch.run("pool", "start", "s", "--cpu", "1")
    assert done.returncode == 0, done.stderr
    password = orch.url.partition(":")[2].partition(":")[2].partition("@")[0]
    assert len(password) > 10
    seen = orch.json("trial", "show", "s", "0")["user_attrs"]
    assert not [name for name in seen["environment"] if name.startswith(("PG", "ORCH_STORAGE"))]
    assert not [line for line in seen["command_lines"] if password in line]
    assert password not in done.stdout + done.stderr
    logs = [file for file in Path(orch.extra["RAY_TMPDIR"]).rglob("*") if file.is_file()]
    assert [file for file in logs if file.name.startswith("worker-")], "Ray's logs must have been looked at"
    for file in logs:
        assert password not in file.read_text(errors="replace"), file
    orch.nothing_left()


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_gpus": 4, "num_cpus": 4, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def ray_cluster() -> Iterator[str]:
    """Address of a Ray cluster that says it has four GPUs."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.communicate(timeout=60)


def test_workers_on_a_ray_cluster_are_pinned_to_different_gpus(orch: Orch, ray_cluster: str) -> None:
    """Four Workers of a cluster with four GPUs get four different CUDA_VISIBLE_DEVICES."""
    orch.write(
        "pin.py",
        """
import os, time
def objective(trial):
    trial.suggest_float("x", 0, 1)
    gpu = os.environ["CUDA_VISIBLE_DEVICES"]
    trial.set_user_attr("gpu", gpu)
    open(os.path.join(trial.settings["out"], gpu), "w").close()
    while len(os.listdir(trial.settings["out"])) < 4:
        time.sleep(0.02)
    return 0.0
""",
    )
    out = orch.folder / "out"
    out.mkdir()
    orch.ok(
        "study", "create", "s", "--objective", "pin.py:objective", "--n-trials", "4", "--pruner", "none",
        "--set", f"out={out}",
    )  # fmt: skip
    done = orch.run("pool", "start", "s", "--address", ray_cluster)
    assert done.returncode == 0, done.stderr
    trials = orch.json("trial", "list", "s")
    assert sorted(trial["user_attrs"]["gpu"] for trial in trials) == ["0", "1", "2", "3"]
    assert len({trial["worker"] for trial in trials}) == 4
    orch.nothing_left()
