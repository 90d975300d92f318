"""The Workers of one trial: start all ranks, stop all ranks, and say how the trial ended.

Rank 0 runs in the leader's own Worker; every other rank runs in a member that lends its GPU and its trainer. Calls
between them go over Ray, one at a time for each rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import ray

from orchestrator.launcher import Nursery, Outcome, Trainer
from orchestrator.leader import TrialLeader

# How long the other ranks may go on when one has ended: long enough for a last collective and an exit.
COMPLETE_GRACE_S = 60.0
PRUNED_GRACE_S = 10.0
# A rank that dies takes its peers' connections along: their errors may arrive before the news of its death.
FIRST_CAUSE_S = 1.0
# What explains a failure best, when several ranks failed within FIRST_CAUSE_S.
CAUSES = ("refused", "oom", "crash", "error", "cancelled", "stopped")


class Gang:
    """One trial's ranks, from the leader's side."""

    def __init__(self, leader: TrialLeader, job: dict[str, Any], members: Sequence[Any]) -> None:
        self.token: str = job["token"]
        self._leader = leader
        self._job = job
        self._members = members
        self._changed = threading.Condition()
        self._outcomes: dict[int, Outcome] = {}
        self._trainer: Trainer | None = None
        self._stopped = False
        self._gone: ray.exceptions.RayActorError | None = None

    def run(self, nursery: Nursery) -> Outcome:
        """Run the trial on every rank until all have ended; the processes of all ranks are gone when it returns.

        Raises:
            ray.exceptions.RayActorError: a member's Worker died: the gang cannot train this or any other trial.
        """
        me = ray.get_runtime_context().current_actor if self._members else None
        lent = [member.lend.remote(me, {**self._job, "rank": rank}) for rank, member in enumerate(self._members, 1)]
        watchers = [threading.Thread(target=self._watch, args=(i, ref)) for i, ref in enumerate(lent, 1)]
        for watcher in watchers:
            watcher.start()
        trainer = nursery.launch()
        with self._changed:
            self._trainer = trainer
            if self._stopped or any(outcome.failed for outcome in self._outcomes.values()):
                trainer.stop()
        try:
            mine = trainer.serve({**self._job, "rank": 0}, lambda message: self._leader.answer(0, message))
            self.rank_ended(0, mine)
            self._leader.rank_0_ended(mine.kind == "pruned")
            self._wait_for_the_rest()
        finally:
            # Also when the database failed us: no rank may go on without its leader.
            self._leader.end()
            self._stop_members()
            trainer.release()
            trainer.bury()
            for watcher in watchers:
                watcher.join()
        if self._gone is not None:
            raise self._gone
        return self._verdict()

    def rank_ended(self, rank: int, outcome: Outcome) -> None:
        """Take note of how a rank ended; a failure stops the other ranks."""
        with self._changed:
            self._outcomes.setdefault(rank, outcome)
            self._changed.notify_all()
            trainer = self._trainer
        if outcome.failed and rank != 0 and trainer is not None:
            # Rank 0 may be inside a collective that never ends; give its own error, if any, time to be second.
            threading.Timer(FIRST_CAUSE_S, self._stop_rank_0, [trainer]).start()

    def answer(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """Answer a member's rank."""
        return self._leader.answer(rank, message)

    def stop(self) -> None:
        """End every rank; `run` then returns ``stopped``. Callable from any thread."""
        with self._changed:
            self._stopped = True
            trainer = self._trainer
        if trainer is not None:
            trainer.stop()

    def _stop_rank_0(self, trainer: Trainer) -> None:
        with self._changed:
            if 0 in self._outcomes:
                return
        trainer.stop()

    def _watch(self, rank: int, ref: Any) -> None:
        """Wait for a member to be done with its rank; one that could not is a rank that crashed."""
        try:
            ray.get(ref)
        except Exception as error:
            if isinstance(error, ray.exceptions.RayActorError):
                self._gone = error
            self.rank_ended(rank, Outcome("crash", error=f"the Worker of rank {rank} failed: {error}", rank=rank))

    def _wait_for_the_rest(self) -> None:
        """Give the other ranks time to end by themselves, as long as how rank 0 ended deserves."""
        grace_s = {"complete": COMPLETE_GRACE_S, "pruned": PRUNED_GRACE_S, "stopped": 0.0}
        deadline = time.monotonic() + grace_s.get(self._outcomes[0].kind, FIRST_CAUSE_S)
        with self._changed:
            while len(self._outcomes) < self._job["world_size"]:
                failed = any(outcome.failed for outcome in self._outcomes.values())
                left = min(deadline - time.monotonic(), FIRST_CAUSE_S if failed else COMPLETE_GRACE_S)
                if left <= 0 or (not self._changed.wait(left) and failed):
                    return

    def _stop_members(self) -> None:
        for member in self._members:
            member.halt.remote(self.token)

    def _verdict(self) -> Outcome:
        """How the trial ended: rank 0's word, unless a rank failed; then the failure that explains the others."""
        failures = [outcome for outcome in self._outcomes.values() if outcome.failed]
        if self._stopped:
            return Outcome("stopped")
        if failures:
            return min(failures, key=lambda outcome: CAUSES.index(outcome.kind))
        missing = [rank for rank in range(self._job["world_size"]) if rank not in self._outcomes]
        if missing and self._outcomes[0].kind == "complete":
            return Outcome(
                "error",
                error=f"rank {missing[0]} was still running {COMPLETE_GRACE_S:.0f} s after rank 0 had returned",
                rank=missing[0],
            )
        return self._outcomes[0]
