"""A scripted trial for objectives, and a program that runs one on two real gloo ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import torch
import torch.distributed as dist

from objectives import data, engine
from objectives.checkpoint import Checkpoint
from objectives.digits import small_cnn

GOOD_DIGITS = {"lr": 0.015, "momentum": 0.76, "weight_decay": 1e-3, "batch_size": 64, "width": 16, "dropout": 0.17}


class Killed(BaseException):
    """Stands for SIGKILL: nothing that the objective does can catch it by accident."""


class ScriptedTrial:
    """A contract.Trial whose parameters and verdicts are decided beforehand, and which remembers its curve."""

    def __init__(
        self,
        folder: Path,
        params: dict[str, Any] | None = None,
        *,
        settings: dict[str, Any] | None = None,
        resume: Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 7,
        prune_after: int | None = None,
        kill_before_report: int | None = None,
    ) -> None:
        self.number = 0
        self.params: dict[str, Any] = dict(params or {})
        self.settings: dict[str, Any] = dict(settings or {})
        self.device = "cpu"
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.num_cpus = 1
        self.saved: list[tuple[int, Path]] = []
        self.checkpoint = Checkpoint(folder, resume, rank, lambda step, path: self.saved.append((step, path)))
        self.curve: dict[int, float] = {}
        self._prune_after = prune_after
        self._kill_before_report = kill_before_report

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        assert low <= self.params[name] <= high
        return float(self.params[name])

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        assert low <= self.params[name] <= high
        return int(self.params[name])

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        assert self.params[name] in choices
        return self.params[name]

    def report(self, value: float, step: int) -> None:
        if step == self._kill_before_report:
            raise Killed
        self.curve[step] = value

    def should_prune(self) -> bool:
        return max(self.curve) == self._prune_after

    def set_user_attr(self, key: str, value: Any) -> None:
        raise NotImplementedError


def train_small_digits(trial: ScriptedTrial, epochs: int, model: torch.nn.Module | None = None) -> float:
    """Run the engine on digits with a small network that has dropout, batch norm, momentum and a schedule."""
    engine.seed_everything(trial)
    train, val, classes = data.digits()
    train_loader, val_loader = data.loaders(train, val, 64, trial)
    model = model or small_cnn(8, 0.3, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=epochs * len(train_loader))
    loss_fn = torch.nn.functional.cross_entropy
    return engine.fit(trial, model, train_loader, val_loader, optimizer, scheduler, epochs, loss_fn)


def _run_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Train uninterrupted, killed, resumed and pruned; return what this rank saw of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

    def trial(name: str, **more: Any) -> ScriptedTrial:
        return ScriptedTrial(folder / name, rank=rank, world_size=2, **more)

    whole = trial("whole")
    engine.seed_everything(whole)
    model = small_cnn(8, 0.3, 10)
    value = train_small_digits(whole, 3, model)
    killed = trial("killed", kill_before_report=2)
    try:
        train_small_digits(killed, 3)
    except Killed:
        dist.barrier()
    resumed = trial("resumed", resume=folder / "killed" / "step-00000002.pt")
    train_small_digits(resumed, 3)
    pruned = trial("pruned", prune_after=2)
    try:
        train_small_digits(pruned, 3)
        verdict = "completed"
    except optuna.TrialPruned:
        verdict = "pruned"
    _, val, _ = data.digits()
    _, val_loader = data.loaders(val, val, 64, whole)
    dist.destroy_process_group()
    return {
        "value": value,
        "running_mean": model[1].running_mean.tolist(),
        "whole": whole.curve,
        "killed": killed.curve,
        "resumed": resumed.curve,
        "pruned": pruned.curve,
        "verdict": verdict,
        "saved": [step for step, _ in whole.saved],
        "validated": sum(len(labels) for _, labels in val_loader),
    }


def main(folder: Path) -> None:
    """Fork two ranks, as the nursery does: this process has imported everything and has not used autograd."""
    children = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                (folder / f"rank-{rank}.json").write_text(json.dumps(_run_rank(rank, folder)))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(pid)
    failed = [pid for pid in children if os.waitpid(pid, 0)[1] != 0]
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
