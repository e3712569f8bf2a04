"""NaN Guard (native) on a minimal VAE, without ComfyUI: accumulation switches during calls, and clipped values."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import native_network
from comfyui_onediff_guard.comfyui_host.native_guards import guarded_vae
from comfyui_onediff_guard.comfyui_host.runs import Settings
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH, SWITCHES
from comfyui_onediff_guard.precision.arch import ARCHITECTURES
from comfyui_onediff_guard.precision.guard import GuardPolicy
from torch import nn

CALLS: list[tuple[Any, ...]] = []  # not on the network, whose state the guard restores after a failed call


class Network(nn.Module):
    """Decodes by a matrix product and a clip in a helper function."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.raises = False

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        CALLS.append((latents.dtype, os.environ.get(ATTENTION_SWITCH), reduction()))
        if self.raises:
            raise ValueError("broken")
        return torch.tanh(clipped(self.layer(latents)) / 1e5)

    encode = decode


def clipped(x: torch.Tensor) -> torch.Tensor:
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x


def reduction() -> bool:
    return bool(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction)


class Vae:
    """As ComfyUI's VAE."""

    def __init__(self, dtype: torch.dtype):
        self.vae_dtype, self.device = dtype, torch.device("cpu")
        self.first_stage_model = Network().to(dtype).requires_grad_(False)
        self.first_stage_model.layer.weight.copy_(torch.diag(torch.tensor([1.0, 1.0, 1.0, 4e4])))

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        return self.first_stage_model.decode(latents.to(self.vae_dtype)).float()

    decode_tiled = encode = encode_tiled = decode


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Any:
    CALLS.clear()
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)

    def card(name: str) -> None:
        monkeypatch.setattr(native_network, "verified_architecture", lambda *_: ARCHITECTURES[name])

    return card


@pytest.mark.parametrize(
    ("card", "dtype", "switch", "reduced"),
    [
        ("sm80", torch.float16, "0", False),
        ("sm70", torch.float16, "1", True),
        ("sm80", torch.bfloat16, None, True),
        ("sm80", torch.float32, None, True),
    ],
)
def test_accumulation_switches_are_set_only_during_call(
    on_card: Any, card: str, dtype: torch.dtype, switch: str | None, reduced: bool
) -> None:
    on_card(card)
    vae = Vae(dtype)
    guarded_vae(vae, Settings(GuardPolicy())).decode(torch.ones(1, 4))
    assert [(dtype, switch, reduced)] == CALLS
    assert (os.environ.get(ATTENTION_SWITCH), reduction()) == (None, True)


def test_accumulation_switches_are_restored_after_error(on_card: Any) -> None:
    on_card("sm80")
    vae = Vae(torch.float16)
    vae.first_stage_model.raises = True
    with pytest.raises(ValueError, match="broken"):
        guarded_vae(vae, Settings(GuardPolicy())).decode(torch.ones(1, 4))
    assert CALLS[0] == (torch.float16, "0", False) and [dtype for dtype, *_ in CALLS] == [torch.float16, torch.float32]
    assert (os.environ.get(ATTENTION_SWITCH), reduction()) == (None, True)


def test_clipped_output_is_recomputed_in_fp32_with_switches_set(on_card: Any) -> None:
    on_card("sm80")
    vae = Vae(torch.float16)
    latents = torch.full((1, 4), 4.0)
    single = Vae(torch.float32)
    wrong, right = vae.decode(latents), single.decode(latents)
    assert wrong.isfinite().all() and (wrong - right).abs().max() > 0.2
    CALLS.clear()
    assert torch.equal(guarded_vae(vae, Settings(GuardPolicy())).decode(latents), right)
    dtypes = [dtype for dtype, *_ in CALLS]
    assert dtypes[:2] == [torch.float16, torch.float32]
    assert {state[1:] for state in CALLS} == {("0", False)}
