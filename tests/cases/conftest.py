"""Small models, each built for one mechanism by which diffusion models come out black."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.headless.small_families import build_cogview3
from comfyui_onediff_guard.pipelines.families import COGVIDEOX, FamilySpec
from comfyui_onediff_guard.pipelines.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.placement import PlainPlacement
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.policy import Precision


@pytest.fixture
def on_card() -> Callable[..., PipelineHandle]:
    """on_card(folder, "sm75", precision) → a pipeline that takes this CPU for that card."""

    def open_folder(folder: Path, card: str, precision: str = "auto", family: FamilySpec = COGVIDEOX):
        options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
        handle = load(folder, family, precision=Precision(precision), **options)
        return replace(handle, architecture=arch.named(card))

    return open_folder


@pytest.fixture
def changed(model_folder, tmp_path) -> Callable[..., Path]:
    """changed(folder, component, class, change) → a copy whose component's float32 weights `change` altered."""

    def copy(folder: Path, component: str, kind: Any, change: Callable[[Any], None]) -> Path:
        target = shutil.copytree(folder, tmp_path / f"{folder.name}-{component}")
        module = kind.from_pretrained(target / component)
        with torch.no_grad():
            change(module)
        shutil.rmtree(target / component)
        module.save_pretrained(target / component)
        return target

    return copy


@pytest.fixture(scope="session")
def cogview3_folder(tmp_path_factory) -> Path:
    """A healthy small CogView3-Plus folder."""
    return build_cogview3(tmp_path_factory.mktemp("cogview") / "small-cogview3", layers=3)
