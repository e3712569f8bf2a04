"""Channels-last convolutions (--force-channels-last) with ComfyUI's own memory manager."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from in_comfyui import OURS
from memory import MANAGEMENT, decode, moving, opened

CompileOptions = import_module(f"{OURS}.pipelines.compile.backends").CompileOptions
laid_out = import_module(f"{OURS}.pipelines.weights.placement").laid_out


def test_channels_last_flag_sets_layout_across_moves(tmp_path: Path) -> None:
    """The layout holds on the card, also after the manager has offloaded and reloaded the weights."""
    flag_is_set = "--force-channels-last" in sys.argv
    handle = opened("cogview3", tmp_path)
    assert handle.compile_options.channels_last == flag_is_set
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    without_flag = decode(replace(handle, compile_options=CompileOptions()), latents)[0]
    vae, pictures = handle.store.module("vae", "fp32", place=False), list[torch.Tensor]()
    for _ in range(2):
        pictures.append(decode(handle, latents)[0])
        assert laid_out(vae, channels_last=True) == flag_is_set
        assert moving.card_bytes(vae)
        MANAGEMENT.unload_all_models()
        assert not moving.card_bytes(vae)
    assert (pictures[0] - without_flag).norm() < 1e-5 * without_flag.norm()
    assert torch.equal(*pictures)
