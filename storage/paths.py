"""Where orch keeps what belongs to this machine."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from storage.errors import OrchError


def orch_home() -> Path:
    """Return `$ORCH_HOME`, else /var/lib/orch for root, else the user's data folder; created when missing.

    Raises:
        OrchError: the folder cannot be made, or is no folder.
    """
    is_root = os.geteuid() == 0
    given = os.environ.get("ORCH_HOME")
    if given:
        home = Path(given).expanduser().absolute()
    else:
        home = Path("/var/lib/orch") if is_root else platformdirs.user_data_path("orch")
    if home.is_dir():
        return home
    # Root's is open to pass through, not to list: the database server in it runs as another user.
    mode = 0o711 if is_root else 0o700
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(mode)
        home.chmod(mode)  # the umask may have taken away more
    except FileExistsError:
        if not home.is_dir():
            raise OrchError(f"{home} is not a folder: set ORCH_HOME to one") from None
    except OSError as error:
        raise OrchError(f"cannot make {home} ({error.strerror}): set ORCH_HOME to a folder you may write to") from None
    return home
