"""Device memory of a sampling run with group offload, on a card of any speed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.pipelines.weights.offload import Offload, Parts
from comfyui_onediff_guard.pipelines.weights.placement import bytes_of
from small_runs import SIZES, opened_fresh, prompts, sampled


def deep(handle: PipelineHandle) -> PipelineHandle:
    """Add blocks, so that there are more than are loaded at once."""
    denoiser = handle.store.module(handle.family.denoiser, "fp32", place=False)
    if len(handle.family.blocks) == 1:
        blocks: Any = denoiser.get_submodule(handle.family.blocks[0])
        blocks.extend(copy.deepcopy(blocks[0]) for _ in range(3))
    return handle


@pytest.mark.parametrize("model", SIZES)
def test_group_offload_needs_only_two_blocks_beside_activations(card: Any, model: str) -> None:
    made, most = {}, {}
    for offload in ("none", "group"):
        handle = deep(opened_fresh(model, offload))
        prompts(handle)
        denoiser = handle.store.module(handle.family.denoiser, "fp32", place=False)
        at_once = bytes_of(denoiser)
        if handle.offload is Offload.GROUP:
            at_once = Parts.of(denoiser, Offload.GROUP, handle.family.blocks).most_bytes(ahead=True)
        sampled(handle, model)  # loads image encoders too
        handle.store.leave_device(but=handle.family.denoiser)
        torch.cuda.synchronize()
        card.reset()
        made[offload], report = sampled(handle, model)
        most[offload] = card.most_used() - at_once
        assert most[offload] > 0 and not [note for note in report.notes if "out of memory" in note]
        handle.store.empty()
    assert at_once < 0.9 * bytes_of(denoiser)
    assert most["group"] <= 1.05 * most["none"]
    assert torch.equal(made["group"], made["none"])
