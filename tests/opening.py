"""Many processes that open one database at the same moment: `python -m tests.opening N URL...`.

For each URL, forks N processes that wait for one another and then open it; prints what went wrong, and exits with 1.
"""

from __future__ import annotations

import os
import sys
import traceback

from storage import open_database


def open_at_once(url: str, n: int) -> bool:
    """Whether all of the processes could open the database."""
    reader, writer = os.pipe()
    children = []
    for _ in range(n):
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)  # returns when the parent has closed its end: all start together
            try:
                open_database(url).close()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(pid)
    os.close(writer)
    os.close(reader)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    return not any(statuses)


if __name__ == "__main__":
    outcomes = [open_at_once(url, int(sys.argv[1])) for url in sys.argv[2:]]
    sys.exit(0 if all(outcomes) else 1)
