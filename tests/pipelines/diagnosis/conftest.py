"""A machine whose hardware and software the tests set."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.precision import machine
from comfyui_onediff_guard.precision.accumulation import SWITCHES


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No GPU, no driver, no exported variables, a CPU build of PyTorch, a compiler: on any real machine."""
    for name in (*SWITCHES, *machine._HIDING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(machine, "_NVIDIA_MODULE", tmp_path / "absent")
    monkeypatch.setattr(machine, "_AMD_MODULE", tmp_path / "absent")
    monkeypatch.setattr(compiling, "find_c_compiler", lambda: "c++")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """cards((7, 5), (9, 0)): a machine with GPUs of these capabilities."""

    def have(*capabilities: tuple[int, int], built: tuple[str, ...] = ()) -> None:
        monkeypatch.setattr(torch.version, "cuda", "12.8")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"Card {device.index}")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capabilities[getattr(d, "index", d)])
        properties = types.SimpleNamespace(total_memory=24 * 2**30)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))

    return have


@pytest.fixture
def folder(copy: Callable[[str], Path]) -> Path:
    return copy("5b")
