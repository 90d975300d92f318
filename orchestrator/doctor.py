"""What `orch doctor` looks at on this machine: one small function for each thing that can be wrong."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import metadata

from packaging.requirements import Requirement

from orchestrator import doctor_database, doctor_gpu
from orchestrator.finding import Finding, guarded
from storage.paths import orch_home

OLDEST_PYTHON = (3, 11)
GB = 1e9


def examine(url: str | None) -> Iterator[Finding]:
    """Run every check, one after the other; `url` is the storage, None for this machine's private server."""
    torch, ray = doctor_gpu.probe(doctor_gpu.TORCH_PROBE), doctor_gpu.probe(doctor_gpu.RAY_PROBE)
    gpus = doctor_gpu.gpus_of_driver()
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", check_python),
        ("packages", check_packages),
        ("torch", partial(doctor_gpu.check_torch, torch)),
        ("torchvision", partial(doctor_gpu.check_torchvision, torch)),
        ("driver", partial(doctor_gpu.check_driver, gpus)),
        ("cuda", partial(doctor_gpu.check_cuda, torch, gpus)),
        ("nccl", partial(doctor_gpu.check_nccl, torch)),
        ("ray", partial(doctor_gpu.check_ray, ray)),
        ("database", partial(doctor_database.check_database, url)),
        ("postgresql", doctor_database.check_postgresql),
        ("disk", check_disk),
        ("ray's disk", check_ray_disk),
        ("/dev/shm", check_shared_memory),
        ("open files", check_open_files),
        ("hostname", check_hostname),
    ]
    for name, check in checks:
        yield guarded(name, check, url)


def check_python() -> Finding:
    """Python is one that orch supports."""
    says = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", "fail", says, "make a virtual environment with Python 3.11 or newer")
    return Finding("python", "ok", says)


def check_packages() -> Finding:
    """What orch, optuna-dashboard and torchvision require is installed, in versions that fit."""
    wrong = []
    for package in ("orch", "optuna", "optuna-dashboard", "torchvision"):
        for requirement in map(Requirement, metadata.requires(package) or []):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            found = _version(requirement.name)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wrong.append((package, requirement, found))
    if wrong:
        says = "; ".join(f"{package} needs {need}, there is {found or 'none'}" for package, need, found in wrong)
        advice = "pip install " + " ".join(f"'{need.name}{need.specifier}'" for _, need, _ in wrong)
        return Finding("packages", "fail", says, advice)
    shown = ("orch", "optuna", "optuna-dashboard", "psycopg2-binary")
    return Finding("packages", "ok", ", ".join(f"{name} {_version(name) or '-'}" for name in shown))


def check_disk() -> Finding:
    """There is room for checkpoints and the private server."""
    home = orch_home()
    free = shutil.disk_usage(home).free
    says = f"{free / GB:.1f} GB free at {home}"
    if free < 5 * GB:
        return Finding(
            "disk", "fail" if free < GB / 2 else "warn", says, "make room, or set ORCH_HOME to a bigger disk"
        )
    return Finding("disk", "ok", says)


def check_ray_disk() -> Finding:
    """Ray's own folder is not so full that Ray refuses to work."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    usage = shutil.disk_usage(folder)
    says = f"{usage.free / GB:.1f} GB free at {folder}"
    # Ray's own limit, whatever the size of the disk.
    if usage.free < 0.05 * usage.total or usage.free < GB:
        return Finding("ray's disk", "warn", says, "make room, or set RAY_TMPDIR to a folder on a disk with more")
    return Finding("ray's disk", "ok", says)


def check_shared_memory() -> Finding:
    """Data-loader workers, NCCL and Ray have shared memory: containers give 64 MB."""
    size = shutil.disk_usage("/dev/shm").total
    if size < GB:
        advice = "start the container with --shm-size=8g (Kubernetes: an emptyDir with medium Memory), or num_workers 0"
        return Finding("/dev/shm", "warn", f"{size / 1e6:.0f} MB", advice)
    return Finding("/dev/shm", "ok", f"{size / GB:.1f} GB")


def check_open_files() -> Finding:
    """A process may open enough files and sockets; Ray raises the soft limit to the hard one itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    says = f"{soft}, may be raised to {hard}"
    if hard != resource.RLIM_INFINITY and hard < 4096:
        return Finding("open files", "warn", says, "raise it: `ulimit -n 65536` as root, or limits.conf")
    return Finding("open files", "ok", says)


def check_hostname() -> Finding:
    """This machine finds itself by its name, as gloo and Ray want it to."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        advice = f"add it to /etc/hosts: 127.0.1.1 {name}"
        return Finding("hostname", "warn", f"{name} does not resolve ({error.strerror})", advice)
    return Finding("hostname", "ok", f"{name} is {address}")


def _version(package: str) -> str | None:
    # The same module by two names: one is compiled here, the other is not.
    for name in (package, "psycopg2") if package == "psycopg2-binary" else (package,):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
