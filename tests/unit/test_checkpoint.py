"""The checkpoint format: durable, small in number, and never something that cannot be loaded again."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from objectives.checkpoint import Checkpoint, CheckpointUnreadable

Point = namedtuple("Point", "x y")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def roundtrip(folder: Path, state: dict) -> dict:
    checkpoint = Checkpoint(folder, None, rank=0)
    checkpoint.save(state, 1)
    loaded = checkpoint.load()
    assert loaded is not None
    return loaded


def test_nothing_to_load_at_the_first_start(tmp_path):
    """A first start finds no state, and looking does not make the folder."""
    assert Checkpoint(tmp_path / "new", None, rank=0).load() is None
    assert not (tmp_path / "new").exists()


def test_resume_then_own_newest(tmp_path):
    """Before a save the file chosen by the supervisor is loaded, after it this process's newest."""
    Checkpoint(tmp_path / "a", None, rank=0).save({"epoch": 3}, 3)
    checkpoint = Checkpoint(tmp_path / "b", tmp_path / "a" / "step-00000003.pt", rank=0)
    assert checkpoint.load() == {"epoch": 3}
    checkpoint.save({"epoch": 4}, 4)
    assert checkpoint.load() == {"epoch": 4}


def test_last_two_and_best_stay(tmp_path):
    """Of five saves the newest, the one before and the best remain, and nothing temporary."""
    checkpoint = Checkpoint(tmp_path, None, rank=0)
    (tmp_path / ".step-00000001.pt.tmp").write_bytes(b"left by a killed write")
    for step in range(1, 6):
        checkpoint.save({"step": step}, step, best=step in (1, 2))
    assert names(tmp_path) == ["best.pt", "step-00000004.pt", "step-00000005.pt"]
    assert torch.load(tmp_path / "best.pt", weights_only=True) == {"step": 2}


def test_saving_one_step_twice_keeps_the_one_before(tmp_path):
    """A step saved again replaces its own file only, as best too."""
    checkpoint = Checkpoint(tmp_path, None, rank=0)
    for step, value in ((1, "a"), (2, "b"), (2, "c"), (2, "c")):
        checkpoint.save({"value": value}, step, best=True)
    assert names(tmp_path) == ["best.pt", "step-00000001.pt", "step-00000002.pt"]
    assert torch.load(tmp_path / "best.pt", weights_only=True) == checkpoint.load() == {"value": "c"}


def test_going_back_to_an_earlier_step(tmp_path):
    """A run that rewinds keeps what it saved last, although its step is lower."""
    checkpoint = Checkpoint(tmp_path, None, rank=0)
    for step in (7, 8, 3):
        checkpoint.save({"step": step}, step)
    assert checkpoint.load() == {"step": 3}


def test_best_is_copied_where_hard_links_do_not_work(tmp_path, monkeypatch):
    """A file system without hard links gets a copy as its best."""

    def refuse(self, target):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    Checkpoint(tmp_path, None, rank=0).save({"step": 1}, 1, best=True)
    assert torch.load(tmp_path / "best.pt", weights_only=True) == {"step": 1}
    assert names(tmp_path) == ["best.pt", "step-00000001.pt"]


def test_on_save_comes_after_writing_and_before_removing(tmp_path):
    """Who records the newest step finds its file there, and the file recorded before it as well."""
    seen = []
    checkpoint = Checkpoint(tmp_path, None, rank=0, on_save=lambda step, path: seen.append((step, names(path.parent))))
    for step in (1, 2, 3):
        checkpoint.save({}, step)
    files = ["step-00000001.pt", "step-00000002.pt", "step-00000003.pt"]
    assert seen == [(1, files[:1]), (2, files[:2]), (3, files)]


def test_other_ranks_write_nothing(tmp_path):
    """A save on rank 1 returns at once, and what it loads next is what rank 0 wrote."""
    other = Checkpoint(tmp_path / "trial", None, rank=1, on_save=lambda *_: pytest.fail("rank 1 told the database"))
    other.save({"bad": object()}, 1)
    assert not (tmp_path / "trial").exists()
    Checkpoint(tmp_path / "trial", None, rank=0).save({"step": 1}, 1)
    assert other.load() == {"step": 1}


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """A write that breaks off leaves no partial file, tells nobody, and the last state is still the newest."""
    told = []
    checkpoint = Checkpoint(tmp_path, None, rank=0, on_save=lambda step, _: told.append(step))
    checkpoint.save({"step": 1}, 1)

    def break_off(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", break_off)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save({"step": 2}, 2)
    assert names(tmp_path) == ["step-00000001.pt"]
    assert told == [1]
    assert checkpoint.load() == {"step": 1}


def test_what_training_needs_comes_back(tmp_path):
    """Model, optimizer, schedule, scaler and random states survive a save, layer versions included."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 1, 4, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "random": {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()},
    }
    loaded = roundtrip(tmp_path, state)
    assert loaded["model"]._metadata == state["model"]._metadata
    torch.testing.assert_close(dict(loaded["model"]), dict(state["model"]))
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    assert loaded["random"]["python"] == random.getstate()
    torch.set_rng_state(loaded["random"]["torch"])


def test_numpy_values_are_converted(tmp_path):
    """numpy arrays come back as tensors and numpy scalars as Python numbers, wherever they are."""
    array = np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1]
    loaded = roundtrip(tmp_path, {np.str_("a"): array, "b": [np.float64(0.5), np.int32(3), np.bool_(True)]})
    assert loaded["a"].tolist() == array.tolist()
    assert loaded["a"].dtype == torch.int64
    assert loaded["b"] == [0.5, 3, True]
    assert [type(item) for item in loaded["b"]] == [float, int, bool]


def test_containers_keep_their_kind(tmp_path):
    """Every kind of container and scalar that is accepted is read back equal."""
    state = {
        "dict": {1: None, (2, 0.5): b"x"},
        "ordered": OrderedDict(a=1),
        "counter": Counter("aab"),
        "rest": [(1, True), {1, 2}, 2j, bytearray(b"y"), torch.float16, torch.device("cpu"), torch.Size([2])],
    }
    loaded = roundtrip(tmp_path, state)
    assert loaded == state
    assert [type(value) for value in loaded.values()] == [dict, OrderedDict, Counter, list]


def test_parameters_views_and_tied_weights(tmp_path):
    """Parameters become plain tensors, a view does not save its base, and tied weights are written once."""
    big = torch.zeros(250_000)
    loaded = roundtrip(tmp_path, {"parameter": torch.nn.Parameter(big), "tied": big, "view": big[:2]})
    assert type(loaded["parameter"]) is torch.Tensor
    assert loaded["parameter"].data_ptr() == loaded["tied"].data_ptr()
    assert loaded["view"].untyped_storage().nbytes() == 8
    assert (tmp_path / "step-00000001.pt").stat().st_size < 1_100_000


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"path": Path("x")}, r"state\['path'\] is a pathlib"),
        ({"history": [1, 2, 3, datetime.now(UTC)]}, r"state\['history'\]\[3\] is a datetime.datetime"),
        ({"a": {"b": defaultdict(int)}}, r"state\['a'\]\['b'\] is a collections.defaultdict"),
        ({"point": Point(1, 2)}, r"state\['point'\]"),
        ({"model": torch.nn.Linear(1, 1)}, r"state\['model'\] is a torch.nn.modules.linear.Linear"),
        ({"when": np.datetime64("2026-01-01")}, r"state\['when'\] is a datetime.date"),
        ({"wide": np.longdouble(1)}, r"state\['wide'\]"),
        ({"words": np.array(["a"])}, r"state\['words'\] is a numpy array of dtype <U1"),
        ({"generator": torch.Generator()}, r"state\['generator'\]"),
        ({"meta": torch.ones(1, device="meta")}, r"state\['meta'\] is a meta tensor"),
        ({"frozen": frozenset()}, r"state\['frozen'\]"),
        ({Fraction(1, 2): 1}, "a key of state is a fractions.Fraction"),
        ({"set": {Fraction(1, 2)}}, r"an item of state\['set'\]"),
    ],
)
def test_what_cannot_be_loaded_is_refused_before_writing(tmp_path, state, key):
    """State that weights_only=True could not read back is refused at once, by its key, and no file appears."""
    with pytest.raises(TypeError, match=key):
        Checkpoint(tmp_path / "trial", None, rank=0).save(state, 1)
    assert not (tmp_path / "trial").exists()


@pytest.mark.parametrize("size", [0, 10, 1000])
def test_a_truncated_file_is_named(tmp_path, size):
    """A truncated checkpoint is one error that names the file and does not advise loading it unsafely."""
    Checkpoint(tmp_path, None, rank=0).save({"weights": torch.ones(1000)}, 1)
    path = tmp_path / "step-00000001.pt"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointUnreadable, match=r"step-00000001.pt cannot be read: it is truncated") as caught:
        Checkpoint(tmp_path / "b", path, rank=0).load()
    assert "weights_only" not in str(caught.value)


def test_foreign_pickles_are_not_executed(tmp_path):
    """A file that is a pickle of something else is unreadable, in one line."""
    path = tmp_path / "other.pt"
    torch.save({"path": Path("x")}, path)
    with pytest.raises(CheckpointUnreadable, match=r"other.pt") as caught:
        Checkpoint(tmp_path, path, rank=0).load()
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    """A checkpoint that is gone is a FileNotFoundError with its path."""
    with pytest.raises(FileNotFoundError, match=r"gone.pt"):
        Checkpoint(tmp_path, tmp_path / "gone.pt", rank=0).load()
