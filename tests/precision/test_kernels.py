"""Where PyTorch has no lean kernel for a call, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import kernels
from comfyui_onediff_guard.precision.activations import META
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, EXPERIMENTAL
from comfyui_onediff_guard.precision.kernels import (
    LEAN,
    has_fused_attention,
    kernels_of,
    no_cudnn_conv3d,
    no_fused_attention,
)
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode

CPU = torch.device("cpu")  # which tells, as a card does, whether a fused kernel takes a call
FUSED = (torch.empty(2, 30, 17_776, 64, dtype=torch.bfloat16, device=META),) * 3
UNFUSED: dict[str, Any] = {"dropout_p": 0.5}  # no fused kernel takes that


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu", "meta"])
def test_only_cuda_and_rocm_are_asked(device: str) -> None:
    assert kernels_of(torch.device(device)) is LEAN
    assert not LEAN.attention(*FUSED) and not LEAN.conv3d(torch.float16)


def test_of_a_card_both_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "no_fused_attention", lambda *given: asked.append(given) or "why")
    card = torch.device("cuda", 1)
    assert kernels_of(card).attention(*FUSED) == "why" and asked == [(card, *FUSED)]


@pytest.mark.parametrize("device", ["cuda", "cpu", "mps", "xpu", "privateuseone"])
def test_a_device_that_is_not_known_to_attend_in_one_kernel_does_not(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """It is asked in the dtype of products, in a mode that makes float32 of half precision."""
    asked: list[torch.dtype] = []

    def why_not(_device: torch.device, query: torch.Tensor, *_: Any) -> str:
        asked.append(query.dtype)
        return "why" * (query.shape[-1] > 256)

    monkeypatch.setattr(kernels, "no_fused_attention", why_not)
    has_fused_attention.cache_clear()
    with ScaledHalfMatmulMode(torch.float16):
        found = [has_fused_attention(torch.device(device), width, torch.float16) for width in (64, 512)]
    has_fused_attention.cache_clear()
    assert found == {"cuda": [True, False], "cpu": [True, True]}.get(device, [False, False])
    assert asked == [torch.float16] * 2 * (device == "cuda")


def test_a_device_is_asked_by_shapes_and_dtype_alone() -> None:
    assert no_fused_attention(CPU, *FUSED) == ""
    mask = torch.empty(2, 1, 17_776, 17_776, dtype=torch.bool, device=META)
    assert no_fused_attention(CPU, *FUSED, mask, scale=0.5) == ""
    assert no_fused_attention(CPU, *FUSED, **UNFUSED).startswith(
        f"PyTorch has no fused attention in bf16 with heads of 64 on {kernels.detect(CPU)}, so that all scores are in "
    )


@pytest.mark.parametrize(
    ("architecture", "asked_for", "remedy"),
    [
        ("sm75", "", "Another precision may have one."),
        ("gfx103", "", "A newer PyTorch for ROCm may have one."),
        ("gfx11", "", f"Set {EXPERIMENTAL}=1 in the environment before the start, or get a newer PyTorch for ROCm."),
        ("gfx11", "0", f"Set {EXPERIMENTAL}=1 in the environment before the start, or get a newer PyTorch for ROCm."),
        ("gfx11", "1", "A newer PyTorch for ROCm may have one."),
    ],
)
def test_what_to_do(monkeypatch: pytest.MonkeyPatch, architecture: str, asked_for: str, remedy: str) -> None:
    row = ARCHITECTURES[architecture]
    monkeypatch.setattr(kernels, "detect", lambda _: row)
    monkeypatch.setattr(torch.version, "hip", "7.0" if architecture.startswith("gfx") else None)
    monkeypatch.setenv(EXPERIMENTAL, asked_for)
    assert no_fused_attention(CPU, *FUSED, **UNFUSED).endswith(f"on {row}, so that all scores are in memory. {remedy}")


@pytest.mark.parametrize(
    ("version", "cudnn", "without"),
    [
        ("2.8.0+cu128", 9_10_02, False),
        ("2.9.0+cu126", 9_07_01, False),
        ("2.9.0+cu128", 9_10_02, True),
        ("2.9.0+cu128", 9_15_01, True),
        ("2.9.1+cu128", 9_10_02, True),
        ("2.9.1+cu130", 9_13_00, True),
        ("2.9.1+cu128", 9_15_00, False),
        ("2.10.0+cu128", 9_10_02, True),
        ("2.10.0+cu130", 9_15_01, False),
        ("2.13.0+cpu", None, False),
    ],
)
def test_half_convolutions_in_3d_by_versions(monkeypatch, version, cudnn, without):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    for dtype in (torch.float16, torch.bfloat16):
        why = no_cudnn_conv3d(dtype)
        assert bool(why) == without
    if without and cudnn == 9_10_02:
        assert f"PyTorch {version}" in why and "(here: 9.10)" in why and "PyTorch 2.11 or newer" in why
    assert no_cudnn_conv3d(torch.float32) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")  # where the number is MIOpen's
    assert no_cudnn_conv3d() == ""
