"""Fixtures: small models that use_card black by one mechanism each, and runs of them as on a given card."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shared_models
import torch
from as_comfyui import GRAPHS, Made
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from comfyui_onediff_guard.pipelines.run import handle
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision import arch
from comfyui_onediff_guard.precision.policy import Precision
from cpu_bf16 import cpu_multiplies_bf16  # noqa: F401 - a fixture for all tests here
from diffusers import AutoencoderKLTemporalDecoder
from small_families import build_cogview3


@pytest.fixture
def on_card() -> Callable[..., PipelineHandle]:
    """on_card(folder, "sm75", precision) → a pipeline that treats this CPU as that card."""

    def open_folder(folder: Path, card: str, precision: str = "auto", family: FamilySpec = COGVIDEOX):
        options: dict[str, Any] = {"backend": "eager", "offload": "none", "placement": PlainPlacement()}
        opened = load(folder, family, precision=Precision(precision), **options)
        return replace(opened, architecture=arch.named(card))

    return open_folder


@pytest.fixture
def card(monkeypatch) -> Callable[[str], None]:
    """card("sm75") makes loader nodes treat this CPU as that card."""

    def use_card(name: str) -> None:
        monkeypatch.setattr(handle, "verified_architecture", lambda *_: arch.named(name))
        monkeypatch.setattr(handle, "present", lambda: ())

    return use_card


@pytest.fixture
def through_nodes(card, tmp_path) -> Callable[..., Made]:
    """through_nodes(family, folder, "sm75", precision) → the result of the family's graph on that card.

    decode="fp32" saves time: fp16 convolutions take long on a CPU.
    """

    def run(family: str, folder: Path, name: str, precision: str = "auto", **settings: str) -> Made:
        card(name)
        with host.plain_folders(models=[folder.parent], input=tmp_path, output=tmp_path):
            return GRAPHS[family].run(folder, precision=precision, **settings)

    return run


@pytest.fixture
def changed(model_folder, tmp_path) -> Callable[..., Path]:
    """changed(folder, component, class, change) → a copy of it with `change` applied to a component's weights."""

    def copy(folder: Path, component: str, kind: Any, change: Callable[[Any], None]) -> Path:
        target = shared_models.copied(folder, tmp_path / f"{folder.name}-{component}")
        module = kind.from_pretrained(target / component)
        with torch.no_grad():
            change(module)
        shutil.rmtree(target / component)
        module.save_pretrained(target / component)
        return target

    return copy


@pytest.fixture(scope="session")
def cogview3_folder() -> Path:
    """A healthy small CogView3-Plus folder."""
    return shared_models.built(build_cogview3, layers=3)


@pytest.fixture(scope="session")
def svd_folder() -> Path:
    """A small SVD whose VAE has two layers per block, like the published one: its decoder uses attention only then."""
    return shared_models.built(small_svd_of_two_layers)


def small_svd_of_two_layers(path: Path) -> None:
    folder = shared_models.copied(shared_models.model_folder("svd"), path)
    config = AutoencoderKLTemporalDecoder.load_config(folder / "vae")
    torch.manual_seed(0)
    AutoencoderKLTemporalDecoder.from_config(config, layers_per_block=2).save_pretrained(folder / "vae")
