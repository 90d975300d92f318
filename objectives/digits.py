"""A small CNN on scikit-learn's handwritten digits: real data, no download, under a second per epoch on one CPU core.

    orch study create digits --objective objectives.digits:objective --direction maximize --n-trials 20 --max-steps 9

The value is the validation accuracy. A step is an epoch.
"""

from __future__ import annotations

import torch
from torch import nn

from objectives import data, engine, settings
from objectives.contract import Trial

SETTINGS = engine.SETTINGS | data.SETTINGS | {"epochs"}


def objective(trial: Trial) -> float:
    """Train on 1,433 images of 8 x 8 pixels and return the best validation accuracy.

    Settings: ``epochs`` (default 9, so that Hyperband with 9 steps has rungs at 1, 3 and 9), ``checkpoint_every``,
    ``precision``, ``num_workers``.

    Raises:
        ValueError: A setting is unknown.
    """
    settings.check(trial.settings, SETTINGS)
    epochs = int(trial.settings.get("epochs", 9))
    learning_rate = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    momentum = trial.suggest_float("momentum", 0.5, 0.99)
    weight_decay = trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True)
    batch_size = trial.suggest_categorical("batch_size", [32, 64, 128])
    width = trial.suggest_int("width", 8, 32, step=8)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)

    engine.seed_everything(trial)
    train, val, num_classes = data.digits()
    train_loader, val_loader = data.loaders(train, val, batch_size, trial)
    model = small_cnn(width, dropout, num_classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    # No warm-up: the first epochs have to tell good configurations from bad ones.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train_loader))
    return engine.fit(trial, model, train_loader, val_loader, optimizer, scheduler, epochs, nn.functional.cross_entropy)


def small_cnn(width: int, dropout: float, num_classes: int) -> nn.Sequential:
    """Return a network from images [N, 1, 8, 8] to logits [N, num_classes], with ``width`` first-layer channels."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(2 * width * 4 * 4, num_classes),
    )
