"""The training loop on CPU, on one rank and on two real gloo ranks, and the objectives that use it."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
import torch
from torch.utils.data import Subset, TensorDataset
from torchvision import transforms

from objectives import data, digits, engine, resnet
from tests.objective_doubles import GOOD_DIGITS, Killed, ScriptedTrial, train_small_digits

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh Python in the repository, as bare as the nursery is."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(autouse=True)
def one_thread():
    """Small networks are faster on one thread, and two suites at once do not fight for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the two ranks write."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    """What each of two forked gloo ranks saw of whole, killed, resumed and pruned runs."""
    result = python("-m", "tests.objective_doubles", str(folder))
    assert result.returncode == 0, result.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_see_the_same_metric(ranks):
    """Both ranks compute, report and return exactly the same values, and they learn something."""
    assert ranks[0]["whole"] == ranks[1]["whole"]
    assert list(ranks[0]["whole"]) == ["1", "2", "3"]
    assert ranks[0]["value"] == ranks[1]["value"] == max(ranks[0]["whole"].values()) > 0.8


def test_two_ranks_measure_the_model_that_is_saved(ranks, folder):
    """Both ranks measure what rank 0 saved, although batch norm saw other images on rank 1."""
    state = torch.load(folder / "whole" / "step-00000003.pt", weights_only=True)
    _, val, classes = data.digits()
    model = digits.small_cnn(8, 0.3, classes).eval()
    model.load_state_dict(state["model"])
    images, labels = val.tensors
    with torch.no_grad():
        hits = int((model(images).argmax(dim=1) == labels).sum())
    assert hits / len(labels) == ranks[0]["whole"]["3"]
    assert ranks[1]["running_mean"] == ranks[0]["running_mean"] == state["model"]["1.running_mean"].tolist()


def test_two_ranks_resume_to_the_same_curve(ranks):
    """Two ranks killed after a save go on to exactly the curve of an uninterrupted run, dropout included."""
    for rank in ranks:
        assert rank["killed"] == {"1": rank["whole"]["1"]}
        assert {**rank["killed"], **rank["resumed"]} == rank["whole"]


def test_two_ranks_leave_at_the_same_step(ranks):
    """A verdict to prune ends both ranks after the same epoch."""
    assert [rank["verdict"] for rank in ranks] == ["pruned", "pruned"]
    assert [list(rank["pruned"]) for rank in ranks] == [["1", "2"], ["1", "2"]]


def test_only_rank_0_saves(ranks):
    """Rank 0 records each epoch's checkpoint, rank 1 none."""
    assert [rank["saved"] for rank in ranks] == [[1, 2, 3], []]


def test_two_ranks_validate_each_sample_once(ranks):
    """The shares of both ranks add up to the 364 validation images, none of them twice."""
    assert sum(rank["validated"] for rank in ranks) == 364


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_shares_cover_the_data(tmp_path, world_size):
    """Over any number of ranks, validation has every sample once, and an epoch of training none twice."""
    samples = TensorDataset(torch.arange(23))
    validated: list[int] = []
    trained: list[int] = []
    for rank in range(world_size):
        trial = ScriptedTrial(tmp_path, rank=rank, world_size=world_size)
        train_loader, val_loader = data.loaders(samples, samples, world_size, trial)
        validated += [int(item) for (batch,) in val_loader for item in batch]
        trained += [int(item) for (batch,) in train_loader for item in batch]
    assert sorted(validated) == list(range(23))
    assert len(trained) == len(set(trained)) == 23 // world_size * world_size


def test_resumed_equals_uninterrupted(tmp_path):
    """A run killed between save and report, and resumed, gives exactly the uninterrupted curve, without a hole."""
    whole = ScriptedTrial(tmp_path / "whole")
    value = train_small_digits(whole, 4)
    killed = ScriptedTrial(tmp_path / "killed", kill_before_report=2)
    with pytest.raises(Killed):
        train_small_digits(killed, 4)
    torch.manual_seed(99)  # whatever the process did before must not matter
    resumed = ScriptedTrial(tmp_path / "resumed", resume=killed.saved[-1][1])
    assert train_small_digits(resumed, 4) == value == max(whole.curve.values())
    assert killed.curve == {1: whole.curve[1]}
    assert resumed.curve == {epoch: whole.curve[epoch] for epoch in (2, 3, 4)}


def test_checkpoint_every_second_epoch(tmp_path):
    """With checkpoint_every=2 epochs 2, 4 and the last are saved, and a run killed in epoch 3 goes on after epoch 2."""
    whole = ScriptedTrial(tmp_path / "whole", settings={"checkpoint_every": 2})
    train_small_digits(whole, 5)
    assert [step for step, _ in whole.saved] == [2, 4, 5]
    killed = ScriptedTrial(tmp_path / "killed", settings={"checkpoint_every": 2}, kill_before_report=3)
    with pytest.raises(Killed):
        train_small_digits(killed, 5)
    resumed = ScriptedTrial(tmp_path / "resumed", settings={"checkpoint_every": 2}, resume=killed.saved[-1][1])
    train_small_digits(resumed, 5)
    assert {**killed.curve, **resumed.curve} == whole.curve
    assert list(resumed.curve) == [2, 3, 4, 5]


def test_a_finished_run_resumes_to_its_value(tmp_path):
    """A run that died after its last save returns the value it would have, without training."""
    whole = ScriptedTrial(tmp_path / "whole")
    value = train_small_digits(whole, 2)
    again = ScriptedTrial(tmp_path / "again", resume=whole.saved[-1][1])
    assert train_small_digits(again, 2) == value
    assert again.curve == {2: whole.curve[2]}
    assert again.saved == []


def test_the_best_epoch_is_kept(tmp_path):
    """best.pt holds the first epoch that had the best saved accuracy."""
    trial = ScriptedTrial(tmp_path)
    train_small_digits(trial, 4)
    best = torch.load(tmp_path / "best.pt", weights_only=True)
    assert trial.curve[best["progress"]["epoch"]] == max(trial.curve.values())


@pytest.mark.parametrize("wanted", ["bf16", "fp16", "fp32"])
def test_each_precision_learns_and_resumes(tmp_path, caplog, wanted):
    """Each format trains on CPU, is logged once with its reason, and resumes to the same curve, scaler included."""
    caplog.set_level(logging.INFO, logger="objectives.engine")
    whole = ScriptedTrial(tmp_path / "whole", settings={"precision": wanted})
    assert train_small_digits(whole, 3) > 0.8
    assert caplog.text.count(f"Trial 0 computes in {wanted}: asked for") == 1
    killed = ScriptedTrial(tmp_path / "killed", settings={"precision": wanted}, kill_before_report=2)
    with pytest.raises(Killed):
        train_small_digits(killed, 3)
    resumed = ScriptedTrial(tmp_path / "resumed", settings={"precision": wanted}, resume=killed.saved[-1][1])
    train_small_digits(resumed, 3)
    assert {**killed.curve, **resumed.curve} == whole.curve


def test_fp16_overflow_skips_the_step_and_the_schedule(tmp_path):
    """A first step that overflows in fp16 is skipped without a warning, the scale falls, and training goes on."""
    trial = ScriptedTrial(tmp_path, settings={"precision": "fp16"})
    samples = TensorDataset(torch.eye(8), torch.arange(8) % 2)
    train_loader, val_loader = data.loaders(samples, samples, 2, trial)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

    def steep(logits, labels):
        return 50.0 * torch.nn.functional.cross_entropy(logits, labels)

    engine.fit(trial, model, train_loader, val_loader, optimizer, scheduler, 1, steep)
    state = torch.load(trial.saved[-1][1], weights_only=True)
    assert state["scaler"]["scale"] < 65536
    assert state["scheduler"]["last_epoch"] < len(train_loader)
    assert torch.isfinite(model.weight).all()


def test_pruned_after_the_save(tmp_path):
    """A pruned trial has saved the very epoch it was judged on."""
    trial = ScriptedTrial(tmp_path, prune_after=2)
    with pytest.raises(optuna.TrialPruned, match="after epoch 2"):
        train_small_digits(trial, 4)
    assert [step for step, _ in trial.saved] == [1, 2]


def test_loss_that_is_not_a_number_is_reported(tmp_path):
    """A training loss that stops being finite is reported and returned as NaN, and no checkpoint keeps it."""
    trial = ScriptedTrial(tmp_path)
    train, val, classes = data.digits()
    train_loader, val_loader = data.loaders(train, val, 128, trial)
    model = digits.small_cnn(8, 0.0, classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    value = engine.fit(
        trial, model, train_loader, val_loader, optimizer, None, 3, lambda logits, labels: logits.sum() * math.inf
    )
    assert math.isnan(value)
    assert list(trial.curve) == [1]
    assert math.isnan(trial.curve[1])
    assert trial.saved == []


def test_order_and_transforms_depend_on_seed_and_epoch_alone(tmp_path):
    """Loader workers or none, earlier epochs or none: epoch 2 has the same order and the same random crops."""
    samples = TensorDataset(torch.arange(32 * 16.0).reshape(32, 1, 4, 4))

    class Cropped(torch.utils.data.Dataset):
        crop = transforms.RandomCrop(4, padding=2)

        def __len__(self):
            return 32

        def __getitem__(self, index):
            return self.crop(samples[index][0])

    def epoch_2(num_workers, before, seed=7):
        trial = ScriptedTrial(tmp_path, settings={"num_workers": num_workers}, seed=seed)
        loader, _ = data.loaders(Cropped(), samples, 8, trial)
        for epoch in [*before, 2]:
            loader.sampler.set_epoch(epoch)
            batches = torch.cat(list(loader))
        return batches

    expected = epoch_2(0, before=[])
    state = torch.get_rng_state()
    assert torch.equal(epoch_2(0, before=[1]), expected)
    assert torch.equal(torch.get_rng_state(), state), "loading must not draw from the generator that dropout uses"
    assert torch.equal(epoch_2(2, before=[1]), expected)
    assert not torch.equal(epoch_2(0, before=[], seed=8), expected)


def test_batch_sizes_that_cannot_be(tmp_path):
    """A global batch that does not divide over the ranks, or exceeds the data, is refused in one sentence."""
    samples = TensorDataset(torch.arange(10))
    with pytest.raises(ValueError, match="batch_size 5 is for all ranks together and does not divide by 2"):
        data.loaders(samples, samples, 5, ScriptedTrial(tmp_path, world_size=2))
    with pytest.raises(ValueError, match=r"batch_size 16 is larger than the training set \(10 images\)"):
        data.loaders(samples, samples, 16, ScriptedTrial(tmp_path))


def test_digits_split_is_fixed():
    """Digits are split 1,433 to 364 with every class in both, the same every time."""
    train, val, classes = data.digits()
    assert (len(train), len(val), classes) == (1433, 364, 10)
    assert val.tensors[1].bincount().min() >= 35
    assert torch.equal(val.tensors[0], data.digits()[1].tensors[0])
    assert abs(float(train.tensors[0].mean())) < 0.01


def test_digits_reaches_97_percent(tmp_path):
    """A good configuration of the digits objective reaches 0.97 in nine epochs, reporting each."""
    trial = ScriptedTrial(tmp_path, GOOD_DIGITS)
    assert digits.objective(trial) >= 0.97
    assert list(trial.curve) == list(range(1, 10))


def test_a_bad_digits_configuration_is_bad_early(tmp_path):
    """A learning rate that is far too low shows after one epoch, or Hyperband would have nothing to prune."""
    trial = ScriptedTrial(tmp_path, {**GOOD_DIGITS, "lr": 1e-4}, settings={"epochs": 1})
    assert digits.objective(trial) < 0.6


def test_resnet_learns_synthetic_images(tmp_path, caplog):
    """ResNet-18 on tiny synthetic images lowers its training loss and beats chance."""
    caplog.set_level(logging.INFO, logger="objectives.engine")
    settings = {"image_size": 16, "num_images": 120, "epochs": 2, "batch_sizes": [16]}
    params = {"lr": 0.01, "weight_decay": 1e-4, "momentum": 0.9, "batch_size": 16}
    assert resnet.objective(ScriptedTrial(tmp_path, params, settings=settings)) > 0.2
    losses = [record.args[2] for record in caplog.records if "accuracy" in record.message]
    assert len(losses) == 2
    assert losses[1] < 0.9 * losses[0]


def test_resnet_stem_follows_the_image_size():
    """Images up to 64 pixels keep their size through the stem, larger ones are reduced as for ImageNet."""
    assert isinstance(resnet.build("resnet34", 10, 64).maxpool, torch.nn.Identity)
    large = resnet.build("resnet50", 7, 224)
    assert large.conv1.stride == (2, 2)
    assert large.fc.out_features == 7
    with pytest.raises(ValueError, match="resnet18, resnet34, resnet50, not 'vgg'"):
        resnet.build("vgg", 10, 32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epoch": 3}, "Unknown setting 'epoch': did you mean 'epochs'"),
        ({"data": "mnist"}, "Setting data must be one of synthetic, cifar10, imagenet-folder, not 'mnist'"),
        ({"data": "cifar10"}, "Setting data=cifar10 needs data_dir"),
    ],
)
def test_wrong_settings_are_one_sentence(tmp_path, settings, message):
    """A setting that is unknown or impossible is refused with what to write instead."""
    params = {"lr": 0.01, "weight_decay": 1e-4, "momentum": 0.9, "batch_size": 32}
    with pytest.raises(ValueError, match=message):
        resnet.objective(ScriptedTrial(tmp_path, params, settings=settings))


def test_missing_cifar_says_where_and_how(tmp_path):
    """Without CIFAR-10 the error names the folder, its layout, and that nothing is downloaded; damage counts too."""
    params = {"lr": 0.01, "weight_decay": 1e-4, "momentum": 0.9, "batch_size": 32}
    trial = ScriptedTrial(tmp_path, params, settings={"data": "cifar10", "data_dir": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-py, unpacked from cifar-10-python.tar.gz"):
        resnet.objective(trial)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / name).write_bytes(b"not it")
    with pytest.raises(FileNotFoundError, match=r"missing: files that are whole. It is not downloaded"):
        resnet.objective(trial)


def test_image_folder_layout(tmp_path):
    """An ImageNet-style folder is read as laid out, and a wrong layout is said in one sentence."""
    with pytest.raises(FileNotFoundError, match=r"as train/CLASS/IMAGE.jpg and val/CLASS/IMAGE.jpg"):
        data.image_folder(tmp_path)
    picture = transforms.ToPILImage()(torch.rand(3, 20, 30))
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            picture.save(tmp_path / split / name / "1.png")
    train, val, classes = data.image_folder(tmp_path, 16)
    assert (len(train), len(val), classes) == (2, 2, 2)
    assert [tuple(item[0].shape) for item in (train[0], val[1])] == [(3, 16, 16)] * 2
    (tmp_path / "train" / "owl").mkdir()
    picture.save(tmp_path / "train" / "owl" / "1.png")
    with pytest.raises(ValueError, match=r"do not have the same classes; in one only: \['owl'\]"):
        data.image_folder(tmp_path, 16)


def test_synthetic_images_are_the_same_everywhere():
    """Synthetic images are a pure function of their index, split 4 to 1 with all classes in both."""
    train, val, classes = data.synthetic_images(50, 8, 5)
    again = data.synthetic_images(50, 8, 5)[0]
    assert (len(train), len(val), classes) == (40, 10, 5)
    assert torch.equal(train[3][0], again[3][0])
    assert not torch.equal(train[0][0], train[5][0])
    assert isinstance(train, Subset)
    assert {label for _, label in val} == {label for _, label in train} == set(range(5))


def test_importing_the_objectives_is_safe_before_a_fork():
    """Importing every objective starts no thread and does not touch CUDA: the nursery forks trainers afterwards."""
    program = (
        "import objectives.digits, objectives.resnet, torch\n"
        "from orchestrator.nursery import _threads\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert _threads() == 1\n"
    )
    result = python("-c", program)
    assert result.returncode == 0, result.stderr
