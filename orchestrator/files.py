"""Where orch keeps the files of trials on a machine: logs and checkpoints, by study, trial and attempt."""

from __future__ import annotations

import shutil
from pathlib import Path

from storage.paths import orch_home


def log_root() -> Path:
    """Rank logs: ``study-UID/trial-NUMBER/attempt-TOKEN/rankN.log``."""
    return orch_home() / "logs"


def checkpoint_root() -> Path:
    """Checkpoints: ``study-UID/trial-NUMBER/attempt-TOKEN/``."""
    return orch_home() / "checkpoints"


def _study_folder(root: str | Path, study_uid: str) -> Path:
    return Path(root, f"study-{study_uid[:13]}")


def attempt_folder(root: str | Path, study_uid: str, trial_number: int, token: str) -> Path:
    """The folder of one attempt, which nobody else writes to."""
    return _study_folder(root, study_uid) / Path(f"trial-{trial_number:06d}", f"attempt-{token[:8]}")


def remove_study(study_uid: str) -> None:
    """Delete this machine's logs and checkpoints of a study."""
    for root in (log_root(), checkpoint_root()):
        shutil.rmtree(_study_folder(root, study_uid), ignore_errors=True)
