"""The checkpoint format: what may be saved, how a file becomes durable, which files are kept."""

from __future__ import annotations

import os
import pickle
import shutil
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

BEST_NAME = "best.pt"

# What torch.load(weights_only=True) gives back besides containers and tensors (tried one by one with torch 2.14). The
# types must match exactly: it refuses subclasses such as an IntEnum or a namedtuple.
_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device, torch.Size)


class CheckpointUnreadable(RuntimeError):
    """The checkpoint {path} cannot be read: it is truncated, or it is not a checkpoint."""


class Checkpoint:
    """The resumable state of one trial, as files ``step-00000012.pt`` in one attempt's folder.

    Args:
        folder: Where this attempt writes. Nobody else writes there. Made by the first save.
        resume: The file to start from (often in an earlier attempt's folder), or None at a first start. Who starts the
            trainer chooses it; this class never searches for one.
        rank: This process's rank; only rank 0 writes.
        on_save: Called on rank 0 with (step, path) once the file is durable and before older ones go, so whoever
            records the newest step never points at a file that was never there or is already gone.
    """

    def __init__(
        self, folder: Path, resume: Path | None, rank: int, on_save: Callable[[int, Path], None] | None = None
    ) -> None:
        self._folder = folder
        self._newest = resume
        self._before: Path | None = None
        self._rank = rank
        self._on_save = on_save

    def load(self) -> dict[str, Any] | None:
        """Return the state saved last in this process, else the one to resume from, else None; tensors on the CPU.

        A rank other than 0 reads the file that rank 0 wrote, so after a save it needs a barrier first.

        Raises:
            FileNotFoundError: The file is not there (any more, or yet).
            CheckpointUnreadable: The file is truncated or not a checkpoint.
        """
        if self._newest is None:
            return None
        try:
            state: dict[str, Any] = torch.load(self._newest, weights_only=True, map_location="cpu")
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            # The first sentence only: torch goes on to recommend weights_only=False.
            cause = str(error).partition("\n")[0] or type(error).__name__
            raise CheckpointUnreadable(
                f"The checkpoint {self._newest} cannot be read: it is truncated, or it is not a checkpoint ({cause})"
            ) from error
        return state

    def save(self, state: dict[str, Any], step: int, *, best: bool = False) -> None:
        """Write ``state`` as of finished step ``step`` (from 1), atomically and durably; ranks other than 0 return.

        Tensors are moved to the CPU (a Parameter comes back as a plain tensor), numpy arrays become tensors, and numpy
        scalars become Python numbers. The newest file and the one before it are kept, and with ``best`` also
        ``best.pt``.

        Raises:
            TypeError: ``state`` holds something that ``torch.load(weights_only=True)`` could not read back; the
                message names it, e.g. ``state['history'][3]``. Nothing was written.
        """
        path = self._folder / f"step-{step:08d}.pt"
        if self._rank == 0:
            plain = _plain(state, "state", {})
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(path, lambda file: torch.save(plain, file))
            if best:
                _keep_as_best(path)
            _sync_folder(self._folder)
            if self._on_save is not None:
                self._on_save(step, path)
        if path != self._newest:
            self._newest, self._before = path, self._newest
        if self._rank == 0:
            self._tidy()

    def _tidy(self) -> None:
        """Remove what is neither the newest nor the one before, and what a killed write left behind.

        The one before stays because the newest may be in the folder while the database has not heard of it yet.
        """
        for path in [*self._folder.glob("step-*.pt"), *self._folder.glob(".*.tmp")]:
            if path not in (self._newest, self._before):
                path.unlink(missing_ok=True)


def _plain(value: Any, key: str, moved: dict[Any, torch.Tensor]) -> Any:
    """Return ``value`` with tensors on the CPU and numpy values converted; TypeError names the first bad ``key``.

    ``moved`` remembers tensors already copied, so that tied weights on a GPU stay one tensor in the file.
    """
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind in (torch.Tensor, torch.nn.Parameter):
        return _on_cpu(value, key, moved)
    if kind in (dict, OrderedDict, Counter):
        result = kind(
            {_plain(k, f"a key of {key}", moved): _plain(v, f"{key}[{_label(k)}]", moved) for k, v in value.items()}
        )
        if kind is OrderedDict:
            vars(result).update(vars(value))  # state_dict() hangs the layers' versions on it
        return result
    if kind in (list, tuple):
        return kind(_plain(item, f"{key}[{index}]", moved) for index, item in enumerate(value))
    if kind is set:
        return {_plain(item, f"an item of {key}", moved) for item in value}
    if kind is np.ndarray or isinstance(value, np.generic):
        return _from_numpy(value, key, moved)
    raise _refusal(value, key)


def _on_cpu(tensor: torch.Tensor, key: str, moved: dict[Any, torch.Tensor]) -> torch.Tensor:
    if tensor.is_meta:
        raise TypeError(f"{key} is a meta tensor: it has no values to save")
    if tensor.layout is not torch.strided:
        return tensor.detach().cpu()
    place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if place not in moved or tensor.data_ptr() == 0:
        copy = tensor.detach().cpu()
        # torch.save writes the whole storage, so a small view would drag its big base into the file.
        moved[place] = copy.clone() if copy.untyped_storage().nbytes() > copy.nbytes else copy
    return moved[place]


def _from_numpy(value: Any, key: str, moved: dict[Any, torch.Tensor]) -> Any:
    if isinstance(value, np.generic):
        number = value.item()
        if isinstance(number, np.generic):  # longdouble has no Python equal and returns itself
            raise _refusal(value, key)
        return _plain(number, key, moved)
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except (TypeError, ValueError):
        raise TypeError(f"{key} is a numpy array of dtype {value.dtype}, which has no tensor equal") from None


def _label(key: Any) -> str:
    return repr(key) if isinstance(key, str | int | float | None) else f"<{type(key).__name__}>"


def _refusal(value: Any, key: str) -> TypeError:
    kind = type(value)
    return TypeError(
        f"{key} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) cannot read back: "
        "save tensors, numbers, strings, and dicts, lists, tuples or sets of them"
    )


def _replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write ``path`` so that a reader, or a power cut, finds the whole new file or the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _keep_as_best(path: Path) -> None:
    """Give the file a second name, which costs no space; copy it where the file system has no hard links."""
    best = path.with_name(BEST_NAME)
    temporary = best.with_name(f".{BEST_NAME}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(path)
    except OSError:
        with path.open("rb") as source:
            _replace(best, lambda file: shutil.copyfileobj(source, file))
        return
    temporary.replace(best)
    # rename() does nothing when both names are already the same file: saving one step twice.
    temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is durable only once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
