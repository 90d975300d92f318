"""Which number format is chosen, and that each one trains on CPU."""

from __future__ import annotations

import pytest
import torch

from objectives import precision


def pretend_card(monkeypatch, major: int, minor: int, name: str = "Tesla T4") -> None:
    """Answer as a card of this compute capability does; newer torch says bf16 is "supported" by emulation, too."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)


def test_auto_is_fp32_on_cpu():
    """On CPU nothing is gained by default, so auto is fp32 without a scaler, and says why."""
    chosen = precision.choose("cpu")
    assert (chosen.name, chosen.dtype, chosen.needs_scaler) == ("fp32", None, False)
    assert "cpu" in chosen.reason


def test_auto_is_bf16_where_the_card_has_it(monkeypatch):
    """An A100 (8.0) computes in bf16, without a scaler."""
    pretend_card(monkeypatch, 8, 0, "NVIDIA A100")
    chosen = precision.choose("cuda:0")
    assert (chosen.name, chosen.dtype, chosen.needs_scaler) == ("bf16", torch.bfloat16, False)
    assert "NVIDIA A100 (compute capability 8.0)" in chosen.reason


def test_auto_is_fp16_with_a_scaler_on_older_cards(monkeypatch):
    """A T4 (7.5) only emulates bf16, so auto is fp16 with a scaler."""
    pretend_card(monkeypatch, 7, 5)
    chosen = precision.choose("cuda")
    assert (chosen.name, chosen.dtype, chosen.needs_scaler) == ("fp16", torch.float16, True)
    assert "Tesla T4" in chosen.reason


def test_bf16_is_refused_where_it_would_be_emulated(monkeypatch):
    """Asking for bf16 on a card without it is one sentence that names the card and the way out."""
    pretend_card(monkeypatch, 7, 5)
    with pytest.raises(ValueError, match=r"Tesla T4 \(compute capability 7.5\) does not compute in it: use auto"):
        precision.choose("cuda", "bf16")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("wanted", precision.NAMES)
def test_what_is_asked_for_is_taken(monkeypatch, device, wanted):
    """An explicit format is taken as asked for on CPU and on a card that has it."""
    pretend_card(monkeypatch, 9, 0)
    chosen = precision.choose(device, wanted)
    assert (chosen.name, chosen.device_type, chosen.reason) == (wanted, device, "asked for")


def test_unknown_names_are_refused():
    """A format that does not exist is refused with the list of those that do."""
    with pytest.raises(ValueError, match="auto, bf16, fp16 or fp32, not 'fp8'"):
        precision.choose("cpu", "fp8")


@pytest.mark.parametrize("wanted", precision.NAMES)
def test_each_format_trains_on_cpu(wanted):
    """A step in each format computes in that format, changes the weights, and keeps them fp32."""
    chosen = precision.choose("cpu", wanted)
    model = torch.nn.Linear(4, 2)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = chosen.scaler()
    assert scaler.is_enabled() is chosen.needs_scaler
    with chosen.autocast():
        outputs = model(torch.ones(3, 4))
        loss = torch.nn.functional.cross_entropy(outputs, torch.tensor([0, 1, 0]))
    assert outputs.dtype == (chosen.dtype or torch.float32)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.dtype == torch.float32
    assert not torch.equal(model.weight, before)
