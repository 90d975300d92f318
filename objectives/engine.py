"""The training loop that the shipped objectives share: AMP, DDP, checkpoint and resume, reports and pruning."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import optuna
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, DistributedSampler

from objectives import precision
from objectives.contract import Trial

SETTINGS = frozenset({"checkpoint_every", "precision"})

_log = logging.getLogger(__name__)

LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Progress:
    """How far a trial has come. Accuracies are fractions of 1; NaN before the first epoch."""

    epoch: int = 0
    accuracy: float = math.nan
    best: float = -math.inf
    best_saved: float = -math.inf


def fit(
    trial: Trial,
    model: nn.Module,
    train_loader: DataLoader[Any],
    val_loader: DataLoader[Any],
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    epochs: int,
    loss_fn: LossFn,
) -> float:
    """Train a classifier, report its validation accuracy after each epoch (from 1), and return the best one reported.

    Every rank calls it with the same model; with several, the process group exists already. A resumed trial reports
    what an uninterrupted one would have. If the training loss stops being finite, NaN is reported and returned at
    once, for the study's NaN policy to judge.

    Args:
        trial: Its settings ``precision`` (auto, bf16, fp16, fp32) and ``checkpoint_every`` (epochs, default 1) count.
        model: Maps images [N, C, H, W] to logits [N, classes].
        train_loader: From ``data.loaders``: its sampler is told the epoch.
        val_loader: From ``data.loaders``: over all ranks every image once.
        optimizer: Over ``model.parameters()``.
        scheduler: Stepped after every optimizer step, not every epoch.
        epochs: How many to train in all, those before a restart included.
        loss_fn: (logits, class indices [N]) -> mean loss.

    Raises:
        optuna.TrialPruned: The trial's verdict is to stop; on every rank after the same epoch.
    """
    chosen = precision.choose(trial.device, trial.settings.get("precision", "auto"))
    _log.info("Trial %d computes in %s: %s", trial.number, chosen.name, chosen.reason)
    every = int(trial.settings.get("checkpoint_every", 1))
    model.to(trial.device)
    run = _Run(trial, model, optimizer, scheduler, chosen, chosen.scaler())
    progress = run.resume()
    network = _over_ranks(trial, model)

    for epoch in range(progress.epoch + 1, epochs + 1):
        seed_everything(trial, epoch)
        if isinstance(train_loader.sampler, DistributedSampler):
            train_loader.sampler.set_epoch(epoch)
        own_loss = run.train(network, train_loader, loss_fn)
        loss, accuracy = run.evaluate(own_loss, val_loader)
        if not math.isfinite(loss):
            trial.report(math.nan, epoch)
            _stop_if_pruned(trial, epoch)
            return math.nan
        progress.epoch, progress.accuracy, progress.best = epoch, accuracy, max(progress.best, accuracy)
        # Saved before reported: a verdict may end this process, and whoever goes on needs this very epoch.
        if epoch % every == 0 or epoch == epochs:
            run.save(progress)
        _log.info("Trial %d epoch %d: loss %.4f, accuracy %.4f", trial.number, epoch, loss, accuracy)
        trial.report(accuracy, epoch)
        _stop_if_pruned(trial, epoch)
    return progress.best


def seed_everything(trial: Trial, epoch: int = 0) -> None:
    """Seed torch (CPU and GPU), Python and numpy for one epoch; with epoch 0, before the model is built.

    The loop starts every epoch from (seed, epoch, rank), so random states need not be saved: a resumed trial draws
    the same numbers on every rank, on any device. Only at epoch 0, for the initial weights, do all ranks draw alike.
    """
    rank = trial.rank if epoch else 0
    seed = int(np.random.SeedSequence([trial.seed, epoch, rank]).generate_state(1)[0])
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@dataclass
class _Run:
    """What one trial trains with."""

    trial: Trial
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    precision: precision.Precision
    scaler: torch.amp.GradScaler

    def train(self, network: nn.Module, loader: DataLoader[Any], loss_fn: LossFn) -> Tensor:
        """Train one epoch; return this rank's mean loss, still on the device so that no step waits for it."""
        network.train()
        total = torch.zeros((), dtype=torch.float64, device=self.trial.device)
        for images, labels in loader:
            images, labels = self._to_device(images), self._to_device(labels)
            self.optimizer.zero_grad(set_to_none=True)
            with self.precision.autocast():
                loss = loss_fn(network(images), labels)
            self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scale = self.scaler.get_scale()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # A smaller scale means that the step was skipped for an overflow in fp16; then the schedule waits too.
            if self.scheduler is not None and self.scaler.get_scale() >= scale:
                self.scheduler.step()
            total += loss.detach()
        return total / len(loader)

    @torch.no_grad()
    def evaluate(self, train_loss: Tensor, loader: DataLoader[Any]) -> tuple[float, float]:
        """Return (training loss, validation accuracy) over all ranks, the same on each."""
        # The bare model, not DDP: that would exchange buffers in each forward pass, and ranks may differ in batches.
        self.model.eval()
        if self.trial.world_size > 1:
            for buffer in self.model.buffers():  # all ranks measure the model that rank 0 saves
                dist.broadcast(buffer, src=0)
        correct, total = torch.zeros_like(train_loss), 0
        for images, labels in loader:
            with self.precision.autocast():
                logits = self.model(self._to_device(images))
            correct += (logits.argmax(dim=1) == self._to_device(labels)).sum()
            total += len(labels)
        sums = torch.stack([train_loss, correct, torch.full_like(correct, total)])
        if self.trial.world_size > 1:
            dist.all_reduce(sums)
        loss, hits, count = sums.tolist()
        return loss / self.trial.world_size, hits / count

    def save(self, progress: Progress) -> None:
        """Save all that ``resume`` needs, as of ``progress.epoch``."""
        is_best = progress.accuracy > progress.best_saved
        progress.best_saved = max(progress.best_saved, progress.accuracy)
        state = {
            "progress": asdict(progress),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "scaler": self.scaler.state_dict(),
        }
        self.trial.checkpoint.save(state, progress.epoch, best=is_best)

    def resume(self) -> Progress:
        """Go back to the last checkpoint, if there is one, and report its accuracy again.

        Again, because the trial may have died after the save and before the report, and a curve has no holes.
        """
        state = self.trial.checkpoint.load()
        if state is None:
            return Progress()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if state["scaler"]:  # empty unless it ran in fp16; this card may have another format
            self.scaler.load_state_dict(state["scaler"])
        progress = Progress(**state["progress"])
        _log.info("Trial %d goes on after epoch %d", self.trial.number, progress.epoch)
        self.trial.report(progress.accuracy, progress.epoch)
        return progress

    def _to_device(self, batch: Tensor) -> Tensor:
        return batch.to(self.trial.device, non_blocking=True)


def _over_ranks(trial: Trial, model: nn.Module) -> nn.Module:
    """Wrap the model so that gradients are averaged over the ranks; one rank needs no wrapper."""
    if trial.world_size == 1:
        return model
    return DistributedDataParallel(model, device_ids=[trial.device] if trial.device.startswith("cuda") else None)


def _stop_if_pruned(trial: Trial, epoch: int) -> None:
    if trial.should_prune():
        raise optuna.TrialPruned(f"Stopped after epoch {epoch}")
