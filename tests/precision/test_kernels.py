"""Calls for which PyTorch has no memory-efficient kernel, and the message about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision import kernels
from comfyui_onediff_guard.precision.activation_estimate import META
from comfyui_onediff_guard.precision.arch import ARCHITECTURES, EXPERIMENTAL
from comfyui_onediff_guard.precision.kernels import (
    LEAN,
    has_fused_attention,
    kernels_of,
    no_cudnn_conv3d,
    no_fused_attention,
)
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode

CPU = torch.device("cpu")  # reports, like a GPU, whether a fused kernel accepts a call
FUSED = (torch.empty(2, 30, 17_776, 64, dtype=torch.bfloat16, device=META),) * 3
UNFUSED: dict[str, Any] = {"dropout_p": 0.5}  # no fused kernel accepts dropout


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu", "meta"])
def test_devices_other_than_cuda_report_no_missing_kernels(device: str) -> None:
    assert kernels_of(torch.device(device)) is LEAN
    assert not LEAN.attention(*FUSED) and not LEAN.conv3d(torch.float16)


def test_cuda_device_is_asked_for_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(kernels, "no_fused_attention", lambda *given: asked.append(given) or "why")
    card = torch.device("cuda", 1)
    assert kernels_of(card).attention(*FUSED) == "why" and asked == [(card, *FUSED)]


@pytest.mark.parametrize("device", ["cuda", "cpu", "mps", "xpu", "privateuseone"])
def test_unknown_devices_have_no_fused_attention(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """The query has the dtype of products, even in a mode that turns half precision into float32."""
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


def test_fused_attention_check_needs_only_shapes_and_dtype() -> None:
    assert no_fused_attention(CPU, *FUSED) == ""
    mask = torch.empty(2, 1, 17_776, 17_776, dtype=torch.bool, device=META)
    assert no_fused_attention(CPU, *FUSED, mask, scale=0.5) == ""
    assert no_fused_attention(CPU, *FUSED, **UNFUSED).startswith(
        f"PyTorch has no fused attention in bf16 with heads of 64 on {kernels.detect(CPU)}, so all "
    )


@pytest.mark.parametrize(
    ("architecture", "experimental", "remedy"),
    [
        ("sm75", "", "Another precision may have one."),
        ("gfx103", "", "A newer PyTorch for ROCm may have one."),
        ("gfx11", "", f"Set {EXPERIMENTAL}=1 in the environment before the start, or get a newer PyTorch for ROCm."),
        ("gfx11", "0", f"Set {EXPERIMENTAL}=1 in the environment before the start, or get a newer PyTorch for ROCm."),
        ("gfx11", "1", "A newer PyTorch for ROCm may have one."),
    ],
)
def test_missing_fused_attention_message_names_a_remedy(
    monkeypatch: pytest.MonkeyPatch, architecture: str, experimental: str, remedy: str
) -> None:
    row = ARCHITECTURES[architecture]
    monkeypatch.setattr(kernels, "detect", lambda _: row)
    monkeypatch.setattr(torch.version, "hip", "7.0" if architecture.startswith("gfx") else None)
    monkeypatch.setenv(EXPERIMENTAL, experimental)
    assert no_fused_attention(CPU, *FUSED, **UNFUSED).endswith(
        f"on {row}, so all attention scores are kept in memory. {remedy}"
    )


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
def test_missing_cudnn_conv3d_is_detected_by_versions(monkeypatch, version, cudnn, without):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    for dtype in (torch.float16, torch.bfloat16):
        why = no_cudnn_conv3d(dtype)
        assert bool(why) == without
    if without and cudnn == 9_10_02:
        assert f"PyTorch {version}" in why and "(here: 9.10)" in why and "PyTorch 2.11 or newer" in why
    assert no_cudnn_conv3d(torch.float32) == ""
    monkeypatch.setattr(torch.version, "hip", "7.0")  # the version is MIOpen's then
    assert no_cudnn_conv3d() == ""
