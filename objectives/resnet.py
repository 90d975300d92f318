"""ResNet on CIFAR-10, an ImageNet-style folder, or synthetic images that need no data.

    orch study create resnet --objective objectives.resnet:objective --direction maximize --n-trials 20 --max-steps 9

and for real data ``--set data=cifar10 --set data_dir=/data/cifar10``.

The value is the validation accuracy. A step is an epoch. The network is He et al., "Deep Residual Learning for Image
Recognition", CVPR 2016, arXiv:1512.03385, as in torchvision, with random initial weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from objectives import data, engine, settings
from objectives.contract import Trial

MODELS = {"resnet18": models.resnet18, "resnet34": models.resnet34, "resnet50": models.resnet50}
SOURCES = ("synthetic", "cifar10", "imagenet-folder")
BATCH_SIZES = (32, 64, 128, 256)

SETTINGS = (
    engine.SETTINGS
    | data.SETTINGS
    | {"model", "data", "data_dir", "image_size", "num_images", "batch_sizes", "epochs", "sync_batchnorm"}
)

# Up to this many pixels a side, the ImageNet stem (stride 4) would leave almost nothing of the image (He et al., 4.2).
_SMALL_IMAGE = 64


def objective(trial: Trial) -> float:
    """Train a ResNet with SGD and return the best validation accuracy.

    Settings: ``model`` (resnet18, resnet34, resnet50), ``data`` (synthetic, cifar10, imagenet-folder), ``data_dir``,
    ``image_size`` (pixels a side; synthetic 32, imagenet-folder 224), ``num_images`` (synthetic; 2,000), ``epochs``
    (9), ``batch_sizes`` (the choices, all ranks together; 32, 64, 128, 256), ``sync_batchnorm`` (CUDA only; False),
    ``checkpoint_every``, ``precision``, ``num_workers``.

    Raises:
        ValueError: A setting is unknown or has a value it cannot have.
        FileNotFoundError: The data is not where ``data_dir`` says.
    """
    settings.check(trial.settings, SETTINGS)
    epochs = int(trial.settings.get("epochs", 9))
    learning_rate = trial.suggest_float("lr", 1e-5, 1e-1, log=True)
    weight_decay = trial.suggest_float("weight_decay", 1e-6, 1e-2, log=True)
    momentum = trial.suggest_float("momentum", 0.8, 0.99)
    batch_size = trial.suggest_categorical("batch_size", list(trial.settings.get("batch_sizes", BATCH_SIZES)))

    engine.seed_everything(trial)
    (train, val, num_classes), image_size = _data(trial.settings)
    train_loader, val_loader = data.loaders(train, val, batch_size, trial)
    model = build(trial.settings.get("model", "resnet18"), num_classes, image_size)
    if trial.device.startswith("cuda"):
        model.to(memory_format=torch.channels_last)  # the layout that tensor cores compute in
        if trial.settings.get("sync_batchnorm", False) and trial.world_size > 1:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=learning_rate, momentum=momentum, weight_decay=weight_decay, nesterov=True
    )
    # No warm-up: the first epochs have to tell good configurations from bad ones.
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs * len(train_loader))
    return engine.fit(trial, model, train_loader, val_loader, optimizer, scheduler, epochs, nn.functional.cross_entropy)


def build(name: str, num_classes: int, image_size: int) -> nn.Module:
    """Return an untrained ResNet from images [N, 3, image_size, image_size] to logits [N, num_classes].

    Small images get the stem of He et al.'s CIFAR networks: a 3x3 convolution with stride 1 and no pooling.

    Raises:
        ValueError: ``name`` is not one of ``MODELS``.
    """
    if name not in MODELS:
        raise ValueError(f"Setting model must be one of {', '.join(MODELS)}, not {name!r}")
    model: nn.Module = MODELS[name](weights=None, num_classes=num_classes)
    if image_size <= _SMALL_IMAGE:
        model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        model.maxpool = nn.Identity()
    return model


def _data(chosen: dict[str, Any]) -> tuple[data.Splits, int]:
    """Return the data sets that the settings ask for, and the images' side in pixels."""
    source = chosen.get("data", "synthetic")
    if source not in SOURCES:
        raise ValueError(f"Setting data must be one of {', '.join(SOURCES)}, not {source!r}")
    if source == "synthetic":
        size = int(chosen.get("image_size", 32))
        return data.synthetic_images(int(chosen.get("num_images", 2000)), size, classes=10), size
    if "data_dir" not in chosen:
        raise ValueError(f"Setting data={source} needs data_dir, the folder that holds the images")
    root = Path(chosen["data_dir"])
    if source == "cifar10":
        return data.cifar10(root), 32
    size = int(chosen.get("image_size", 224))
    return data.image_folder(root, size), size
