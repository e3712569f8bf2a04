from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - fixture for all tests in this folder
from hub_server import files, server  # noqa: F401 - fixtures for all tests in this folder


@pytest.fixture
def copy(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """copy(variant) → a copy of a small model's folder, for a test to change."""
    return lambda variant: shared_models.copied(model_folder(variant), tmp_path / "model")


@pytest.fixture
def only_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """only_backends("oneflow", …): the only backends that are available."""

    def install(*names: str) -> None:
        probes = {name: (lambda _, name=name: None if name in names else "it is not there")
                  for name in compiling._PROBES}  # fmt: skip
        monkeypatch.setattr(compiling, "_PROBES", probes)

    return install


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces and counts graphs as usual, and traced code runs uncompiled, since inductor takes long."""
    from onediff.infer_compiler.backends import registry

    compiling._register_inductor()
    compile_block = lambda module, *, options: torch.compile(module, backend="eager", **options)  # noqa: E731
    monkeypatch.setitem(registry._BACKENDS, "inductor", compile_block)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """trained(denoiser, seed=…, metadata=…, **config of peft) → a LoRA file, see lora_models.training"""
    from lora_models import training

    return training(tmp_path_factory.mktemp("loras"))
