"""The part of `orch doctor` that trains: torch, torchvision, the GPUs and their driver, NCCL, and Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from orchestrator.finding import LIMIT_S, Finding, within
from orchestrator.gpu import Gpu, list_gpus
from orchestrator.objective import without_secrets

Facts = Mapping[str, Any]

# In a child process: a broken installation may crash or hang, and only the nursery and the trainer import torch.
# Each line that comes out is one step that worked.
TORCH_PROBE = """
import json
def tell(**facts): print(json.dumps(facts), flush=True)
import torch
tell(torch=torch.__version__, built_for=torch.version.cuda or torch.version.hip)
try:
    tell(nccl=".".join(map(str, torch.cuda.nccl.version())))
except Exception:
    pass
try:
    torch.cuda.init()
except Exception as error:
    tell(no_cuda=str(error))
else:
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    tell(devices=[[d.name, d.total_memory, d.major, d.minor] for d in devices], kernels=torch.cuda.get_arch_list())
import torchvision
boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
torchvision.ops.nms(boxes, torch.ones(1), 0.5)
tell(torchvision=torchvision.__version__)
"""
RAY_PROBE = "import json, ray; print(json.dumps({'ray': ray.__version__}))"


def probe(program: str) -> Facts:
    """What a program in a child process told, step by step; `problem` says where it stopped."""
    command = [sys.executable, "-P", "-c", program]
    try:
        done = within(
            2 * LIMIT_S,
            partial(
                subprocess.run, command, env=without_secrets(), capture_output=True, text=True, timeout=2 * LIMIT_S - 5
            ),
        )
    except (TimeoutError, subprocess.TimeoutExpired):
        return {"problem": "it hangs"}
    except OSError as error:
        return {"problem": str(error)}
    facts: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit {done.returncode} without a word"]
        facts["problem"] = said[-1]
    return facts


def gpus_of_driver() -> list[Gpu]:
    """The GPUs that the driver shows; none if it hangs, of which `check_driver` tells."""
    try:
        return within(LIMIT_S, list_gpus)
    except TimeoutError:
        return []


def check_torch(torch: Facts) -> Finding:
    """Torch can be imported."""
    if "torch" not in torch:
        return Finding(
            "torch", "fail", f"cannot be imported: {torch['problem']}", "install it again: pip install torch"
        )
    return Finding("torch", "ok", f"{torch['torch']}, built for {torch['built_for'] or 'CPU only'}")


def check_torchvision(torch: Facts) -> Finding:
    """Torchvision's compiled operators fit this torch."""
    if "torchvision" in torch:
        return Finding("torchvision", "ok", f"{torch['torchvision']}, its operators work")
    return Finding(
        "torchvision", "fail", f"its operators do not load: {torch['problem']}",
        "install the torchvision that belongs to this torch: pip install --upgrade torch torchvision",
    )  # fmt: skip


def check_driver(gpus: list[Gpu]) -> Finding:
    """The NVIDIA driver answers."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which("nvidia-smi") is None:
        return Finding("driver", "warn", "no NVIDIA driver", "train with --cpu N, or install the driver for its GPUs")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[0]
    if done.returncode != 0 or not gpus:
        return Finding(
            "driver", "fail", f"nvidia-smi says: {said}",
            "mend the driver (after an upgrade of it: restart the machine), or train with --cpu N",
        )  # fmt: skip
    return Finding("driver", "ok", f"{said}, {len(gpus)} GPU(s): {', '.join(gpu.name for gpu in gpus)}")


def check_cuda(torch: Facts, gpus: list[Gpu]) -> Finding:
    """Torch can use the GPUs there are, and has kernels for them."""
    devices = torch.get("devices", [])
    if devices:
        shown = ", ".join(
            f"{name} ({memory / 2**30:.0f} GiB, sm_{major}{minor})" for name, memory, major, minor in devices
        )
        missing = [d[0] for d in devices if not _has_kernels(torch["kernels"], d[2], d[3])]
        if missing:
            return Finding(
                "cuda", "fail", f"torch {torch['torch']} has no kernels for {', '.join(missing)}",
                "install a build of torch for these GPUs: see pytorch.org/get-started",
            )  # fmt: skip
        return Finding("cuda", "ok", shown)
    if not gpus:
        return Finding("cuda", "warn", "no GPU that torch can use", "train with --cpu N")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return Finding("cuda", "warn", "CUDA_VISIBLE_DEVICES hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    if "torch" in torch and torch["built_for"] is None:
        return Finding(
            "cuda", "fail", "torch is built for CPU only", "install torch with CUDA: see pytorch.org/get-started"
        )
    return Finding(
        "cuda", "fail", f"torch cannot use the GPUs: {torch.get('no_cuda') or torch.get('problem')}",
        "update the NVIDIA driver, or install a torch that is built for an older CUDA: see pytorch.org/get-started",
    )  # fmt: skip


def check_nccl(torch: Facts) -> Finding:
    """Torch has NCCL, which carries the gradients between GPUs."""
    if "nccl" in torch:
        return Finding("nccl", "ok", torch["nccl"] + ("" if torch.get("devices") else ", not used without a GPU"))
    if torch.get("devices"):
        return Finding(
            "nccl", "fail", "this torch has no NCCL", "install a build of torch with CUDA, or use one GPU per trial"
        )
    return Finding("nccl", "ok", "none, and none is needed without a GPU")


def check_ray(ray: Facts) -> Finding:
    """Ray can be imported; says whether RAY_ADDRESS names a cluster."""
    if "ray" not in ray:
        return Finding(
            "ray", "fail", f"cannot be imported: {ray['problem']}", "install it again: pip install 'ray[default]'"
        )
    address = os.environ.get("RAY_ADDRESS")
    joined = (
        f"RAY_ADDRESS={address} is joined only by `orch pool start --address auto`"
        if address
        else "RAY_ADDRESS not set"
    )
    return Finding("ray", "ok", f"{ray['ray']}; {joined}")


def _has_kernels(kernels: list[str], major: int, minor: int) -> bool:
    """Whether one of torch's builds runs on a GPU: same major number and no newer, or any older one as PTX."""
    for kernel in kernels:
        kind, _, number = kernel.rstrip("af").partition("_")
        if not number.isdigit():
            return True  # not NVIDIA's: gfx90a
        built = int(number[:-1]), int(number[-1])
        if built <= (major, minor) and (kind == "compute" or built[0] == major):
            return True
    return False
