"""What one trial does: train a small network on scikit-learn's handwritten digits, and return its accuracy.

Replace the data and the model by yours. What orch needs of this file is one function that takes a trial, asks it for
parameters, and returns the number that the study maximizes or minimizes.
"""

from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


def objective(trial: Any) -> float:
    """Train with the trial's parameters; return the accuracy on images that were not trained on."""
    # What the study searches: every suggest_ line is one parameter with its range. The trial is Optuna's.
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    width = trial.suggest_int("width", 16, 128, step=16)
    dropout = trial.suggest_float("dropout", 0.0, 0.5)

    # What is the same for all trials: `settings:` in study.yaml.
    epochs = trial.settings["epochs"]
    batch_size = trial.settings["batch_size"]

    # trial.device is this trial's own GPU ("cuda:0"), or "cpu"; trial.seed differs from trial to trial.
    torch.manual_seed(trial.seed)
    train_images, val_images, train_labels, val_labels = load_data(trial.device)
    model = build_model(width, dropout).to(trial.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    # None at the first start. After a crash or an interruption: what was saved last, so that training goes on there.
    start = 1
    saved = trial.checkpoint.load()
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epoch"] + 1

    accuracy = 0.0 if saved is None else saved["accuracy"]
    for epoch in range(start, epochs + 1):
        model.train()
        for batch in torch.randperm(len(train_images)).split(batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_images[batch]), train_labels[batch]).backward()
            optimizer.step()

        model.eval()
        with torch.no_grad():
            accuracy = (model(val_images).argmax(dim=1) == val_labels).float().mean().item()

        # Save before reporting: a trial that is interrupted here is not trained twice.
        trial.checkpoint.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "accuracy": accuracy},
            step=epoch,
        )
        # A step is an epoch, counted from 1. What is reported is compared with the other trials ...
        trial.report(accuracy, step=epoch)
        # ... and a hopeless trial stops here. (One that has reached max_steps is never stopped by its last report.)
        if trial.should_prune():
            raise optuna.TrialPruned

    return accuracy


def build_model(width: int, dropout: float) -> nn.Module:
    """Return a small convolutional network: images of 8 x 8 pixels in, a score for each of the ten digits out."""
    return nn.Sequential(
        nn.Conv2d(1, width, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(width * 4 * 4, 10),
    )


def load_data(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return training images, validation images, and their labels; scikit-learn brings them along."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    # The same split in every trial: values of different trials must be comparable.
    train, val = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=digits.target)
    return images[train].to(device), images[val].to(device), labels[train].to(device), labels[val].to(device)
