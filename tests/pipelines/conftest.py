from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from comfyui_onediff_guard.pipelines.families import COGVIDEOX
from comfyui_onediff_guard.pipelines.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision


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
