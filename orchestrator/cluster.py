"""The Ray cluster of a pool: started privately or joined, and the Workers placed on it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator import gpu as gpus
from orchestrator.errors import PoolError
from orchestrator.worker import Worker, WorkerConfig, WorkerPlace
from storage import OrchError

PLACE_TIMEOUT_S = 120
OBJECT_STORE_BYTES = 100 * 1024 * 1024  # nothing of ours goes through it


@dataclass(frozen=True)
class Wanted:
    """The Workers that a pool is asked for."""

    cpu: int | None = None  # that many Workers without a GPU
    gpus: int | None = None  # that many GPUs; neither: all there are
    address: str | None = None  # a Ray cluster to join
    all_nodes: bool = False
    cpus_per_worker: int | None = None


@dataclass(frozen=True)
class Cluster:
    """A connected Ray, and how many Workers of which size it will hold."""

    n_workers: int
    num_cpus: int  # per Worker
    gpu: bool
    node_id: str | None  # Workers stay on this node; None: anywhere


@dataclass
class Crew:
    """The actors of one gang: the leader first."""

    names: list[str]
    workers: list[Any] = field(default_factory=list)
    places: list[WorkerPlace] = field(default_factory=list)
    group: PlacementGroup | None = None

    @property
    def leader(self) -> Any:
        """The Worker of rank 0."""
        return self.workers[0]

    def kill(self) -> None:
        """End every actor of the gang; their nurseries clean up."""
        for worker in self.workers:
            ray.kill(worker)
        if self.group is not None:
            remove_placement_group(self.group)
        self.workers, self.group = [], None


@contextlib.contextmanager
def connect(wanted: Wanted) -> Iterator[Cluster]:
    """Start Ray privately on this machine, or join the cluster at `wanted.address`; disconnect at the end.

    Raises:
        PoolError: no GPU, not enough of them, or no cluster there.
    """
    before = dict(os.environ)
    # Ray's processes inherit the environment, and must not find the way into the database there.
    os.environ.pop("ORCH_STORAGE", None)
    # Ray's memory monitor kills Workers for what their trainers use; usage statistics would leave the machine.
    os.environ.update(RAY_memory_monitor_refresh_ms="0", RAY_USAGE_STATS_ENABLED="0")
    try:
        cluster = _start_private(wanted) if wanted.address is None else _join(wanted)
        yield cluster
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


def place(cluster: Cluster, config: WorkerConfig, names: list[str]) -> Crew:
    """Place one gang, a Worker per name, on one node if it fits.

    Raises:
        PoolError: Ray had no room within PLACE_TIMEOUT_S, or a Worker refused its place.
        ObjectiveError: a node's copy of the objective differs.
    """
    resources = {"CPU": float(cluster.num_cpus), **({"GPU": 1.0} if cluster.gpu else {})}
    crew = Crew(names)
    groups = {"gang": max(1, len(names) - 1), "control": 2}
    actor = ray.remote(concurrency_groups=groups)(Worker)  # type: ignore[call-overload]  # missing in Ray's stubs
    if len(names) > 1:
        here = {} if cluster.node_id is None else {f"node:{_ip_of(cluster.node_id)}": 0.001}
        crew.group = placement_group([{**resources, **here} for _ in names], strategy="PACK")
    for index, name in enumerate(names):
        options: dict[str, Any] = {"num_cpus": cluster.num_cpus, "num_gpus": 1 if cluster.gpu else 0}
        if crew.group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(crew.group, index)
        elif cluster.node_id is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(cluster.node_id, soft=False)
        crew.workers.append(actor.options(**options).remote(replace(config, name=name)))
    try:
        crew.places = get([worker.place.remote() for worker in crew.workers], timeout_s=PLACE_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        crew.kill()
        raise PoolError(
            f"Ray found no room for {len(names)} Worker(s) with {resources} in {PLACE_TIMEOUT_S} s: see `ray status`, "
            "or ask for fewer"
        ) from None
    except ray.exceptions.RayError as error:
        crew.kill()
        raise PoolError(f"a Worker could not start: {last_line(error)}") from error
    except Exception:
        crew.kill()
        raise
    one_node = len({where.node_id for where in crew.places}) == 1
    ray.get(crew.leader.lead.remote(crew.workers[1:], "127.0.0.1" if one_node else crew.places[0].ip))
    return crew


def get(refs: Any, timeout_s: float | None = None) -> Any:
    """`ray.get`, except that an error of ours comes out as itself and not wrapped in Ray's traceback.

    Raises:
        OrchError: what the Worker raised.
        ray.exceptions.RayError: the Worker is gone, or raised something unexpected.
    """
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, OrchError):
            raise error.cause from None
        raise


def last_line(error: Exception) -> str:
    """The line of an error that says most: Ray's messages end in the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _start_private(wanted: Wanted) -> Cluster:
    if wanted.all_nodes:
        raise PoolError(
            "--all-nodes covers a Ray cluster: give its --address too (`--address auto` on one of its nodes)"
        )
    chosen: list[gpus.Gpu] = []
    if wanted.cpu is None:
        free = gpus.free_gpus()
        chosen = free if wanted.gpus is None else free[: wanted.gpus]
        if not free or len(chosen) < (wanted.gpus or 1):
            raise PoolError(_too_few_gpus(wanted.gpus or 1, len(free)))
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in chosen)
    n_workers = wanted.cpu if wanted.cpu is not None else len(chosen)
    num_cpus = wanted.cpus_per_worker or max(1, (os.cpu_count() or 1) // n_workers)
    # `address="local"`: without it ray.init() joins whatever RAY_ADDRESS or an old session file names.
    _init(
        address="local",
        num_cpus=num_cpus * n_workers,
        num_gpus=len(chosen),
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
    )
    return Cluster(n_workers, num_cpus, wanted.cpu is None, None)


def _init(**arguments: Any) -> None:
    # Ray puts the working folder first on its Workers' sys.path, where a user's storage.py would take our place.
    with contextlib.chdir("/"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **arguments)


def _join(wanted: Wanted) -> Cluster:
    try:
        _init(address=wanted.address)
    except Exception as error:  # ConnectionError, ValueError, RuntimeError: Ray's own words are the best there are
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise PoolError(
            f"cannot join the Ray cluster at {wanted.address}: {said[0]}; one with tokens (Ray 2.60 has) takes "
            "`--address auto` on its nodes, or RAY_AUTH_MODE=token"
        ) from None
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and (wanted.all_nodes or node["NodeID"] == here)]
    n_cpus = sum(int(node["Resources"].get("CPU", 0)) for node in nodes)
    n_gpus = sum(int(node["Resources"].get("GPU", 0)) for node in nodes)
    if wanted.cpu is None and n_gpus < (wanted.gpus or 1):
        ray.shutdown()
        raise PoolError(_too_few_gpus(wanted.gpus or 1, n_gpus))
    n_workers = wanted.cpu if wanted.cpu is not None else (wanted.gpus or n_gpus)
    num_cpus = wanted.cpus_per_worker or max(1, n_cpus // n_workers)
    return Cluster(n_workers, num_cpus, wanted.cpu is None, None if wanted.all_nodes else here)


def _too_few_gpus(wanted: int, there: int) -> str:
    return f"{wanted} GPU(s) wanted, {there} free here: `orch doctor` shows them; `--cpu N` trains without"


def _ip_of(node_id: str) -> str:
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == node_id)
