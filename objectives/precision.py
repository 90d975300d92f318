"""Which number format a trial computes in, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

NAMES = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Precision:
    """A number format for the forward and backward pass; weights and optimizer state stay fp32 (Micikevicius et al.,
    "Mixed Precision Training", ICLR 2018, arXiv:1710.03740).
    """

    name: Literal["bf16", "fp16", "fp32"]
    device_type: str
    reason: str

    @property
    def dtype(self) -> torch.dtype | None:
        """What autocast casts to; None for fp32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}[self.name]

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients must be scaled: those below 6e-8 are zero in fp16, while bf16 has fp32's range."""
        return self.name == "fp16"

    def autocast(self) -> torch.autocast:
        """Return the context for the forward pass and the loss."""
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.dtype is not None)

    def scaler(self) -> torch.amp.GradScaler:
        """Return a gradient scaler, which passes everything through unless the format needs it."""
        return torch.amp.GradScaler(self.device_type, enabled=self.needs_scaler)


def choose(device: str, wanted: str = "auto") -> Precision:
    """Choose the number format for ``device`` ("cpu", "cuda", "cuda:1").

    "auto" takes bf16 where a CUDA device computes in it (compute capability 8.0, Ampere, and newer), else fp16 with
    gradient scaling on CUDA, else fp32. On CPU bf16 and fp16 work when asked for, but rarely make anything faster.

    Raises:
        ValueError: ``wanted`` is none of "auto", "bf16", "fp16", "fp32", or is bf16 on a CUDA device without it.
    """
    if wanted not in ("auto", *NAMES):
        raise ValueError(f"precision must be auto, {', '.join(NAMES[:-1])} or {NAMES[-1]}, not {wanted!r}")
    device_type = torch.device(device).type
    if device_type != "cuda":
        if wanted == "auto":
            return Precision("fp32", device_type, f"{device_type} has no faster format that is safe by default")
        return Precision(wanted, device_type, "asked for")  # type: ignore[arg-type]  # checked above
    has_bf16, card = _bf16_on(device)
    if wanted == "bf16" and not has_bf16:
        raise ValueError(f"precision bf16 was asked for, but {card} does not compute in it: use auto, fp16 or fp32")
    if wanted != "auto":
        return Precision(wanted, device_type, "asked for")  # type: ignore[arg-type]  # checked above
    if has_bf16:
        return Precision("bf16", device_type, f"{card} computes in bf16")
    return Precision("fp16", device_type, f"{card} has no bf16, so fp16 with gradient scaling")


def _bf16_on(device: str) -> tuple[bool, str]:
    """Whether the card computes in bf16, and its name: older cards only emulate it, slower than fp32."""
    major, minor = torch.cuda.get_device_capability(device)
    card = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    return major >= 8 and torch.cuda.is_bf16_supported(), card
