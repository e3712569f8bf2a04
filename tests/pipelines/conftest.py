from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import shared_models
import torch
from comfyui_onediff_guard.pipelines.compile import backends as compiling
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - a fixture for all tests here
from hub_files import files_of
from hub_server import HubServer, running_hub


@pytest.fixture
def copy(model_folder: Callable[..., Path], tmp_path: Path) -> Callable[[str], Path]:
    """copy(variant) → a small model's folder, to be changed."""
    return lambda variant: shared_models.copied(model_folder(variant), tmp_path / "model")


@pytest.fixture
def open_pipeline() -> Callable[..., PipelineHandle]:
    def open_folder(path: Path, precision: str = "fp32", backend: str = "eager", offload: str = "none"):
        return load(
            path,
            COGVIDEOX,
            precision=Precision(precision),
            backend=backend,
            offload=offload,
            placement=PlainPlacement(),
        )

    return open_folder


@pytest.fixture
def broken_in_half(
    model_folder: Callable[..., Path], open_pipeline: Callable[..., PipelineHandle], tmp_path: Path
) -> Callable[..., Path]:
    """broken_in_half(component, how) → a folder whose component overflows fp16."""
    from safetensors.torch import save_file

    def build(component: str, how: Callable[[Any], None]) -> Path:
        folder = shared_models.copied(model_folder("2b"), tmp_path / component)
        module = open_pipeline(folder).store.module(component, "fp32")
        with torch.no_grad():
            how(module)
        (file,) = (folder / component).glob("*.safetensors")
        save_file({k: v.contiguous().clone() for k, v in module.state_dict().items()}, file, metadata={"format": "pt"})
        return folder

    return build


@pytest.fixture
def clamping_text_encoder(broken_in_half: Callable[..., Path]) -> Path:
    """A folder whose text encoder's first attention adds what leaves fp16's range, where T5 clamps it to ±64504. Its
    weights are the same in fp16 and fp32."""

    def overflow(module: Any) -> None:
        weight = module.encoder.block[0].layer[0].SelfAttention.o.weight
        weight.mul_(6e4 / weight.abs().max())
        for rounded in module.parameters():
            rounded.copy_(rounded.half())

    return broken_in_half("text_encoder", overflow)


@pytest.fixture
def only_backends(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """only_backends("oneflow", …): those that are found here."""

    def install(*names: str) -> None:
        probes = {name: (lambda _, name=name: None if name in names else "it is not there")
                  for name in compiling._PROBES}  # fmt: skip
        monkeypatch.setattr(compiling, "_PROBES", probes)

    return install


@pytest.fixture
def traced_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo traces and counts as ever; what it traced runs as it is, where inductor would take long."""
    from onediff.infer_compiler.backends import registry

    compiling._register_inductor()
    compile_block = lambda module, *, options: torch.compile(module, backend="eager", **options)  # noqa: E731
    monkeypatch.setitem(registry._BACKENDS, "inductor", compile_block)
    torch.compiler.reset()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Generator[HubServer]:
    """A hub that huggingface_hub in this process talks to, and an empty cache."""
    with running_hub(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
def files(model_folder: Callable[..., Path]) -> dict[str, bytes]:
    """Of a small CogVideoX."""
    return files_of(model_folder())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """trained(denoiser, seed=…, metadata=…, **config of peft) → a LoRA file, see lora_models.training"""
    from lora_models import training

    return training(tmp_path_factory.mktemp("loras"))
