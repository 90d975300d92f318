"""Data sets and loaders: every rank its share, the same order again after a restart, nothing downloaded."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import CIFAR10, ImageFolder

from objectives.contract import Trial

SETTINGS = frozenset({"num_workers"})

Splits = tuple[Dataset[Any], Dataset[Any], int]
"""(training set, validation set, number of classes); items are (image [C, H, W] float32, class index)."""

_CIFAR_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
_CIFAR_COLOURS = transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_IMAGENET_COLOURS = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def digits() -> Splits:
    """Return scikit-learn's 1,797 handwritten digits, [1, 8, 8], normalised; they come with scikit-learn.

    Every fifth image of each class is for validation (364), whatever the trial's seed, so that all trials of a study
    are measured on the same images.
    """
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1)
    images = (images - 4.88) / 6.02  # mean and standard deviation of the 0..16 grey levels
    labels = torch.from_numpy(bunch.target).long()
    held_out = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        held_out[np.flatnonzero(bunch.target == digit)[::5]] = True
    val = torch.from_numpy(held_out)
    return TensorDataset(images[~val], labels[~val]), TensorDataset(images[val], labels[val]), 10


def cifar10(root: Path) -> Splits:
    """Return CIFAR-10, [3, 32, 32], normalised; training images are cropped and flipped at random.

    Raises:
        FileNotFoundError: ``root`` does not hold the data set whole.
    """
    train_transform = transforms.Compose(
        [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(), _CIFAR_COLOURS]
    )
    val_transform = transforms.Compose([transforms.ToTensor(), _CIFAR_COLOURS])
    folder = Path(root) / CIFAR10.base_folder
    missing = [name for name in _CIFAR_FILES if not (folder / name).is_file()]
    if not missing:
        try:
            train = CIFAR10(root, train=True, transform=train_transform)
            return train, CIFAR10(root, train=False, transform=val_transform), 10
        except RuntimeError:  # a checksum is wrong
            missing = ["files that are whole"]
    raise FileNotFoundError(
        f"CIFAR-10 is expected in {folder}, unpacked from cifar-10-python.tar.gz "
        f"(data_batch_1 to data_batch_5, test_batch, batches.meta); missing: {', '.join(missing)}. It is not downloaded"
    )


def image_folder(root: Path, size: int = 224) -> Splits:
    """Return an ImageNet-style folder, [3, size, size], normalised; training images are cropped and flipped at random.

    Raises:
        FileNotFoundError: ``root`` is not laid out as train/CLASS/IMAGE and val/CLASS/IMAGE.
        ValueError: train/ and val/ do not have the same classes.
    """
    root = Path(root)
    train_transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            _IMAGENET_COLOURS,
        ]
    )
    val_transform = transforms.Compose(
        [transforms.Resize(size * 8 // 7), transforms.CenterCrop(size), transforms.ToTensor(), _IMAGENET_COLOURS]
    )
    try:
        train = ImageFolder(str(root / "train"), transform=train_transform)
        val = ImageFolder(str(root / "val"), transform=val_transform)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"Images are expected in {root} as train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg: {error}"
        ) from None
    if train.classes != val.classes:
        differing = sorted(set(train.classes) ^ set(val.classes))
        raise ValueError(f"{root}/train and {root}/val do not have the same classes; in one only: {differing[:5]}")
    return train, val, len(train.classes)


def synthetic_images(n: int, size: int, classes: int) -> Splits:
    """Return ``n`` learnable images, [3, size, size], the same on every machine; a fifth of them for validation.

    An image is its class's coarse pattern plus as much noise, made when asked for, so that memory does not grow with n.
    """
    if n < 5:
        raise ValueError(f"synthetic images are split 4 to 1, so at least 5 are needed, not {n}")
    every = _SyntheticImages(n, size, classes)
    return Subset(every, range(n // 5, n)), Subset(every, range(n // 5)), classes


class _SyntheticImages(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, n: int, size: int, classes: int) -> None:
        self._n = n
        coarse = torch.randn(classes, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self._patterns = torch.nn.functional.interpolate(coarse, size=(size, size), mode="nearest")

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % len(self._patterns)
        noise = torch.randn(self._patterns.shape[1:], generator=torch.Generator().manual_seed(index + 1))
        return self._patterns[label] + noise, label


class _Repeatable(Dataset[Any]):
    """Seeds random transforms from the batch that asks, which the sampler decides by (seed, epoch) alone.

    So a resumed trial crops and flips as it would have, with any number of loader workers, persistent or not.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(cast(Sized, self._dataset))

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, batch: list[int]) -> list[Any]:
        with torch.random.fork_rng(devices=[]):
            # Not torch.manual_seed, which would reseed the GPU as well. Python's hash of integers is not salted.
            torch.default_generator.manual_seed(hash((self._seed, *batch)))
            return [self._dataset[index] for index in batch]


def loaders(
    train: Dataset[Any], val: Dataset[Any], batch_size: int, trial: Trial
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return this rank's loaders of training and validation batches.

    The training order is a function of (trial.seed, epoch) alone; call ``loader.sampler.set_epoch(epoch)`` first.
    Over all ranks validation has every image exactly once (a DistributedSampler would repeat some to fill up).

    Args:
        train: What to train on, in random order; an incomplete last batch is dropped.
        val: What to measure on, in order.
        batch_size: Images per optimizer step, all ranks together.
        trial: Gives rank, world_size, seed, device, num_cpus and the setting ``num_workers`` (default: none on CPU,
            where they would compete with the training, else trial.num_cpus).

    Raises:
        ValueError: ``batch_size`` does not divide over the ranks, or exceeds the training set.
    """
    share, rest = divmod(batch_size, trial.world_size)
    if rest or not share:
        raise ValueError(f"batch_size {batch_size} is for all ranks together and does not divide by {trial.world_size}")
    num_images = len(cast(Sized, train))
    if num_images // trial.world_size < share:
        raise ValueError(f"batch_size {batch_size} is larger than the training set ({num_images} images)")
    on_cuda = trial.device.startswith("cuda")
    num_workers = int(trial.settings.get("num_workers", trial.num_cpus if on_cuda else 0))
    common: dict[str, Any] = {
        "batch_size": share,
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
        "pin_memory": on_cuda,
    }
    sampler: DistributedSampler[Any] = DistributedSampler(
        train, num_replicas=trial.world_size, rank=trial.rank, seed=trial.seed, drop_last=True
    )
    mine = Subset(val, range(trial.rank, len(cast(Sized, val)), trial.world_size))
    return (
        # A generator of their own: else starting an epoch would draw from the global one, which dropout uses.
        DataLoader(
            _Repeatable(train, trial.seed), sampler=sampler, drop_last=True, generator=torch.Generator(), **common
        ),
        DataLoader(mine, generator=torch.Generator(), **common),
    )
