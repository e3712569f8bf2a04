from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from comfyui_onediff_guard.pipelines import compile as compiling
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.pipelines.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from hub_files import files_of
from hub_server import HubServer, running_hub


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
