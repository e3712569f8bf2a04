"""Diagnosis of machines: their GPUs, drivers, builds of PyTorch and packages, and what is wrong with them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.nodes.native_guard import NaNGuardNative
from comfyui_onediff_guard.pipelines.insight.diagnosis import diagnose, summary
from comfyui_onediff_guard.precision import arch, machine
from comfyui_onediff_guard.precision.accumulation import ATTENTION_SWITCH
from comfyui_onediff_guard.precision.machine import TorchTooOld
from fake_comfy import BareVae
from small_runs import opened
from told import one_line, switch


def test_machine_without_gpu_is_diagnosed_as_cpu() -> None:
    found = diagnose()
    assert found.here and found.architecture.name == "cpu"
    assert found.machine.gpus == () and found.machine.device == "cpu"
    assert found.machine.advice == (), "a PyTorch for the CPU, on a machine with nothing else, is no fault"
    assert "none that PyTorch can use" in found.text()
    assert "none found, neither NVIDIA's nor AMD's" in found.text()
    listed = found.machine.packages
    assert {"torchao", "onediff", "oneflow", "nexfort", "diffusers"} < listed.keys()
    assert listed["diffusers"] == importlib.metadata.version("diffusers"), "what is installed, by its version"


def test_all_gpus_are_listed_and_plan_is_for_first(cards: Callable[..., None]) -> None:
    cards((7, 0), (8, 0), built=("sm_70", "sm_80"))
    found = diagnose()
    assert (found.architecture.name, found.machine.device) == ("sm70", "cuda:0")
    assert "GPU 0: Card 0, sm70 (Volta), 24 GiB" in found.text()
    assert "GPU 1: Card 1, sm80 (Ampere), 24 GiB" in found.text()
    assert found.machine.built_for == "CUDA 12.8"
    assert not [note for note in found.notes if "Card" in note]
    attention = switch(found, ATTENTION_SWITCH)
    assert attention.value == "0" and "shared with another GPU" in attention.reason
    elsewhere = switch(diagnose(architecture=arch.named("sm70")), ATTENTION_SWITCH)
    assert elsewhere.value == "1", "another machine than this one"


def test_gpu_newer_than_table_is_planned_and_guarded(cards: Callable[..., None]) -> None:
    cards((13, 0), built=("sm_90", "compute_120"))
    found = diagnose()
    assert found.architecture.name == "sm130" and not found.architecture.known
    assert "sm130 (not in the table, treated as sm121): not a known architecture" in one_line(found)
    assert {plan.dtype for model in found.models for plan in model.plans} <= {"bf16", "fp16", "fp32"}
    assert all(plan.guarded for model in found.models for plan in model.plans if plan.half)
    assert switch(found, ATTENTION_SWITCH).value == "0"
    assert "no kernels" not in one_line(found), "compute_120 is compiled by the driver"


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((12, 0), ("sm_80", "sm_90"), False),
        ((12, 0), ("sm_90", "compute_90"), True),
        ((8, 9), ("sm_80", "sm_90"), True),
        ((8, 0), ("sm_86",), False),
        ((9, 0), ("sm_90a",), True),
        ((6, 1), ("sm_75", "compute_120"), False),
        ((8, 0), (), True),  # unknown
    ],
)
def test_card_without_kernels_in_pytorch_cannot_run(
    cards: Callable[..., None], capability: tuple[int, int], built: tuple[str, ...], runs: bool
) -> None:
    cards(capability, built=built)
    found = diagnose()
    assert ("has no kernels for Card 0" in one_line(found)) != runs
    assert summary(found).startswith("Can it run?   Yes, on cuda:0: Card 0" if runs else "Can it run?   No. ")


@pytest.mark.parametrize(
    ("name", "requested", "text"),
    [
        ("gfx1030", "", "gfx1030 (RDNA 2): PyTorch has no fused attention for it"),
        ("gfx1030", "1", "gfx1030 (RDNA 2): PyTorch has no fused attention for it"),
        ("gfx1201", "", "gfx1201 (RDNA 4): some releases of PyTorch have fused attention for it only with"),
        ("gfx1201", "1", ""),
        ("gfx942", "", ""),
        ("sm61", "", ""),
    ],
)
def test_note_names_cards_without_fused_attention(
    monkeypatch: pytest.MonkeyPatch, name: str, requested: str, text: str
) -> None:
    monkeypatch.setenv(arch.EXPERIMENTAL, requested)
    notes = [note for note in diagnose(architecture=arch.named(name)).notes if "fused attention" in note]
    assert len(notes) == bool(text)
    assert all(note.startswith(text) and "154 GB" in note for note in notes)
    assert all((f"{arch.EXPERIMENTAL}=1 " in note) == ("some releases" in note) for note in notes)


def test_3d_convolutions_without_cudnn_are_noted(cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    assert diagnose().machine.advice == (), "no card, and no cuDNN that computes"
    cards((8, 6))
    (advice,) = diagnose().machine.advice
    assert advice.startswith("PyTorch 2.9.1+cu128 computes 3D convolutions in half precision without cuDNN")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in for nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("script", "driver"),
    [
        ("for card in L4 A100 L4; do echo 550.54.14, NVIDIA $card; done", "NVIDIA 550.54.14 (NVIDIA L4, NVIDIA A100)"),
        ("echo No NVML: version mismatch; exit 18", "NVIDIA, but nvidia-smi says: No NVML: version mismatch"),
        ("exit 9", "NVIDIA, but nvidia-smi says: nothing, and ends with 9"),
        ("exec sleep 60", "NVIDIA, but nvidia-smi did not answer within 0.2 s"),
    ],
    ids=["two cards", "mismatch", "silent", "hangs"],
)
def test_advice_names_cpu_build_of_pytorch_where_driver_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, driver: str
) -> None:
    file = tmp_path / "bin" / "nvidia-smi"
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o700)
    monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(machine, "_SECONDS", 0.2 if "sleep" in script else 10)
    found = diagnose()
    (advice,) = found.machine.advice
    assert found.machine.driver == driver
    assert "built for the CPU alone, so the card is not used. Install a CUDA build: https://" in advice


def test_driver_is_read_from_kernel_module_without_nvidia_smi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = tmp_path / "version"
    module.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42:15 UTC 2024\n")
    monkeypatch.setattr(machine, "_NVIDIA_MODULE", module)
    assert diagnose().machine.driver == "NVIDIA 535.161.08"
    monkeypatch.setattr(machine, "_NVIDIA_MODULE", tmp_path / "absent")
    monkeypatch.setattr(machine, "_AMD_MODULE", tmp_path)
    assert diagnose().machine.driver.startswith("AMD amdgpu NVRM")


TOO_OLD = "The NVIDIA driver on your system is too old\n(found version 11040)."


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (RuntimeError(TOO_OLD), " ".join(TOO_OLD.split())),
        (AssertionError(), "AssertionError"),
        (None, "it finds none"),
    ],
)
def test_advice_says_why_pytorch_cannot_use_cards(
    cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch, error: Exception | None, text: str
) -> None:
    def init() -> None:
        if error:
            raise error

    cards((8, 0), (8, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = diagnose()
    assert found.machine.gpus == () and found.architecture.name == "cpu"
    (advice,) = found.machine.advice
    assert advice == f"PyTorch is built for CUDA 12.8, but cannot use a GPU: {text}; CUDA_VISIBLE_DEVICES is ''"


def test_errors_of_every_cuda_call_are_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name in ("is_available", "device_count", "current_device", "get_device_capability", "get_arch_list", "init"):
        monkeypatch.setattr(torch.cuda, name, Mock(side_effect=RuntimeError("CUDA error: unknown error")))
    found = diagnose()
    assert found.architecture.name == "cpu"
    assert "cannot use a GPU: CUDA error: unknown error" in one_line(found)


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        *(("2.5.1+cu124", True), ("1.13.1", True)),
        *((version, False) for version in ("2.6.0", "2.6.0a0+git1", "2.10.0.dev1+rocm7", "home-made")),
    ],
)
def test_too_old_pytorch_is_refused_by_doctor_loader_and_guard(
    monkeypatch: pytest.MonkeyPatch, version: str, too_old: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    found = diagnose()
    assert bool(found.machine.advice) == too_old
    assert summary(found).startswith("Can it run?   No. " if too_old else "Can it run?   Yes, ")
    assert version in found.text()
    refused = pytest.raises(TorchTooOld) if too_old else nullcontext()
    with refused as loading:
        opened("5b")
    with refused as guarding:
        NaNGuardNative().apply(vae=BareVae())
    assert [str(error.value) for error in (loading, guarding) if error] == list(found.machine.advice) * 2
    assert all(f"needs PyTorch 2.6 or newer; this is {version}" in advice for advice in found.machine.advice)


def test_versions_are_read_without_importing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"diffusers": "0.42.1", "transformers": "5.23.0", "nexfort": "0.1.dev330"}
    monkeypatch.setattr(machine, "version_of", versions.get)
    found = diagnose()
    assert "packages: diffusers 0.42.1, transformers 5.23.0, onediff not installed" in one_line(found)
    assert "oneflow not installed, nexfort 0.1.dev330" in one_line(found)
    assert [note for note in found.notes if note.startswith("not installed: onediff. In the pack's folder")]
    assert summary(found).startswith("Can it run?   Yes, "), "only nothing is compiled"
    del versions["diffusers"]
    assert summary(diagnose()).startswith("Can it run?   No. ")
    assert "nexfort" not in sys.modules
