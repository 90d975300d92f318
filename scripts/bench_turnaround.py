#!/usr/bin/env python
"""How fast trials follow each other: orch against Ray Tune, on this machine, both timed after their start-up.

Each trial is a fresh no-op that imports torch, takes one parameter and reports one value. Timed is from the start of
the first trial to the end of the last, so neither pays for starting Ray or for importing torch into a first process.

    python scripts/bench_turnaround.py --workers 4 --trials 40

Ray Tune needs `pip install -c requirements.lock -e '.[bench]'`.
orch starts a fresh process for every trial; so does Ray Tune by default; with reuse_actors=True it keeps one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

OBJECTIVE = """
import os, time
import torch

def objective(trial):
    began = time.time()
    x = trial.suggest_float("x", 0, 1)
    trial.report(x, 1)
    with open(trial.settings["log"], "a") as file:
        file.write(f"{os.getppid()} {began} {time.time()}\\n")
    return x
"""

RAY_TUNE = """
import json, os, random, sys, time
os.environ.update(RAY_memory_monitor_refresh_ms="0", RAY_USAGE_STATS_ENABLED="0")
import ray
from ray import tune

def trainable(config):
    began = time.time()
    import torch
    tune.report({"loss": config["x"], "began": began, "ended": time.time()})

workers, trials, reuse = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "reuse"
ray.init(address="local", num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level="error")
tuner = tune.Tuner(
    trainable,
    param_space={"x": tune.uniform(0, 1)},
    tune_config=tune.TuneConfig(num_samples=trials, reuse_actors=reuse, max_concurrent_trials=workers),
    run_config=tune.RunConfig(verbose=0, storage_path=sys.argv[4]),
)
results = [result.metrics for result in tuner.fit()]
assert len(results) == trials
print(json.dumps({"seconds": max(r["ended"] for r in results) - min(r["began"] for r in results)}))
"""


def run_orch(workers: int, trials: int) -> tuple[float, list[float]]:
    """Trials per second, and the gaps in ms between two trials of the same worker."""
    from orchestrator import api
    from storage import open_database, studies

    name = f"bench-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        Path(folder, "noop.py").write_text(OBJECTIVE)
        url = api.storage_url()
        api.create_study(
            name, storage=url, objective=f"{folder}/noop.py:objective", n_trials=trials, sampler="random",
            pruner="none", settings={"log": str(log)},
        )  # fmt: skip
        command = [sys.executable, "-P", "-m", "orchestrator.cli", "pool", "start", name, "--cpu", str(workers)]
        done = subprocess.run(
            command, env={**os.environ, "ORCH_STORAGE": url}, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(done.stderr)
        rows = sorted(tuple(map(float, line.split())) for line in log.read_text().splitlines())
        database = open_database(url)
        studies.delete(database, studies.get(database, name).study_id)
        database.close()
    assert len(rows) == trials, "every trial must have run, once"
    gaps = [(b[1] - a[2]) * 1000 for a, b in itertools.pairwise(rows) if a[0] == b[0]]
    return trials / (max(row[2] for row in rows) - min(row[1] for row in rows)), gaps


def run_ray_tune(workers: int, trials: int, mode: str) -> float:
    """Trials per second of Ray Tune."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "tune_noop.py")
        script.write_text(RAY_TUNE)
        command = [sys.executable, str(script), str(workers), str(trials), mode, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(done.stderr)
        return trials / float(json.loads(done.stdout.strip().splitlines()[-1])["seconds"])


def main() -> None:
    """Run all three in turn, and print rates and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--trials", type=int, default=40, help="of orch, and of Ray Tune with reuse_actors")
    parser.add_argument("--fresh-trials", type=int, default=12, help="of Ray Tune by default, which is slow")
    arguments = parser.parse_args()
    ours, gaps = run_orch(arguments.workers, arguments.trials)
    print(f"orch, a fresh process each:       {ours:6.2f} trials/s with {arguments.workers} workers")
    ordered = sorted(gaps)
    p90 = ordered[int(0.9 * (len(ordered) - 1))]
    print(f"  from a trial's end to the next one's start on the same worker, storage included: "
          f"median {statistics.median(gaps):.0f} ms, 90 % within {p90:.0f} ms")  # fmt: skip
    fresh = run_ray_tune(arguments.workers, arguments.fresh_trials, "fresh")
    print(f"Ray Tune, a fresh actor each:     {fresh:6.2f} trials/s; orch is {ours / fresh:.1f} times as fast")
    reused = run_ray_tune(arguments.workers, arguments.trials, "reuse")
    print(f"Ray Tune, reuse_actors=True:      {reused:6.2f} trials/s; orch is {ours / reused:.1f} times as fast")


if __name__ == "__main__":
    main()
