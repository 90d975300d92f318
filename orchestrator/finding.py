"""What one check of `orch doctor` found, and how a check is run: one that breaks or hangs is a finding too."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from storage.errors import OrchError
from storage.url import redact_text

T = TypeVar("T")

LIMIT_S = 60  # for one check: nothing waits longer, not even for a driver or a network disk that hangs


@dataclass(frozen=True)
class Finding:
    """What one check saw, and what to do about it if it is not ok."""

    name: str
    status: Literal["ok", "warn", "fail"]
    says: str
    advice: str | None = None


def guarded(name: str, check: Callable[[], Finding], url: str | None = None, limit_s: float = LIMIT_S) -> Finding:
    """Run one check: one that is wrong itself, or that hangs, is a finding too, and the others go on."""
    try:
        return within(limit_s, check)
    except TimeoutError:
        return Finding(
            name, "fail", f"no answer within {limit_s:g} s", "see what hangs: a driver, a disk, or the network"
        )
    except OrchError as error:
        return Finding(name, "fail", str(error), "mend that, and run `orch doctor` again")
    except Exception as error:
        said = redact_text(f"{type(error).__name__}: {error}", url or "")
        return Finding(name, "warn", f"the check itself is broken ({said})", "report it as a fault of orch")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Call in a thread that is left behind if it takes too long: a process that hangs in a driver cannot be killed.

    Raises:
        TimeoutError: it took longer. What the call itself raises goes through.
    """
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=limit_s)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]
