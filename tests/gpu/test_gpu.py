"""What only a GPU can show: pinning, one pool per GPU, precision, NCCL, memory given back; skipped without one."""

from __future__ import annotations

import subprocess

import pytest

from orchestrator.gpu import list_gpus
from tests.runs import Orch, wait_for

GPUS = list_gpus()
if not GPUS:
    pytest.skip("no NVIDIA GPU on this machine", allow_module_level=True)

TRAIN = """
import os, time
import torch
from objectives import precision

def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    block = torch.ones(2**28, device=trial.device)  # 1 GiB
    chosen = precision.choose(trial.device)
    with chosen.autocast():
        trial.set_user_attr("dtype", str((block[:256].reshape(16, 16) @ block[:256].reshape(16, 16)).dtype))
    trial.set_user_attr("devices", torch.cuda.device_count())
    if trial.world_size > 1:
        total = torch.full((1,), x, device=trial.device)
        torch.distributed.all_reduce(total)
        trial.set_user_attr("backend", torch.distributed.get_backend())
        assert abs(total.item() - 2 * x) < 1e-6
    while os.path.exists(trial.settings["wait"]):
        time.sleep(0.02)
    return x
"""


def used_mib() -> list[int]:
    """Memory in use on each GPU."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


def create(orch: Orch, *more: str) -> None:
    orch.write("train.py", TRAIN)
    orch.ok(
        "study", "create", "s", "--objective", "train.py:objective", "--n-trials", "2", "--pruner", "none",
        "--set", f"wait={orch.folder / 'wait'}", *more,
    )  # fmt: skip


def test_a_trial_sees_one_gpu_trains_in_bf16_and_gives_its_memory_back(orch: Orch) -> None:
    """A GPU Worker's trial sees exactly one device and the precision of it; nothing stays on the GPU after the pool."""
    before = used_mib()
    create(orch)
    orch.ok("pool", "start", "s", "--gpus", "1")
    for trial in orch.json("trial", "list", "s"):
        assert trial["state"] == "COMPLETE"
        assert trial["user_attrs"] == {"dtype": "torch.bfloat16", "devices": 1}
    orch.nothing_left()
    wait_for(
        lambda: all(now <= was + 64 for now, was in zip(used_mib(), before, strict=True)), "memory given back", 20.0
    )


def test_a_second_pool_is_told_that_the_gpus_are_taken(orch: Orch) -> None:
    """While a pool holds every GPU, another one is refused in one line; then they are free again."""
    (orch.folder / "wait").touch()
    create(orch)
    first = orch.start("pool", "start", "s")
    wait_for(lambda: [t for t in orch.json("trial", "list", "s") if t["user_attrs"]], "a trial runs")
    assert "0 free here" in orch.refused("pool", "start", "s", "--gpus", str(len(GPUS)))
    (orch.folder / "wait").unlink()
    first.communicate(timeout=120)
    assert first.returncode == 0
    orch.nothing_left()


@pytest.mark.skipif(len(GPUS) < 2, reason="NCCL takes two GPUs")
def test_two_ranks_meet_over_nccl(orch: Orch) -> None:
    """A trial with two ranks uses NCCL, a GPU for each."""
    create(orch, "--gpus-per-trial", "2")
    orch.ok("pool", "start", "s", "--gpus", "2")
    assert {trial["user_attrs"]["backend"] for trial in orch.json("trial", "list", "s")} == {"nccl"}
    orch.nothing_left()
