"""Convolutions with their channels last, under ComfyUI's own memory manager, as --force-channels-last asks for them."""

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


def test_the_layout_that_comfyuis_flag_asks_for(tmp_path: Path) -> None:
    """On the card, and after the manager has moved the weights out and in again."""
    asked = "--force-channels-last" in sys.argv
    handle = opened("cogview3", tmp_path)
    assert handle.compile_options.channels_last == asked
    latents = torch.randn(1, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    as_read = decode(replace(handle, compile_options=CompileOptions()), latents)[0]
    vae, pictures = handle.store.module("vae", "fp32", place=False), list[torch.Tensor]()
    for _ in range(2):
        pictures.append(decode(handle, latents)[0])
        assert laid_out(vae, channels_last=True) == asked
        assert moving.there(vae)
        MANAGEMENT.unload_all_models()
        assert not moving.there(vae)
    assert (pictures[0] - as_read).norm() < 1e-5 * as_read.norm()
    assert torch.equal(*pictures)
