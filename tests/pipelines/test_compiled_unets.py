"""Blocks of a UNet are of several kinds and sizes: all are compiled, and channels-last layout is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, compiled
from comfyui_onediff_guard.pipelines.compile.block import graphs_compiled
from comfyui_onediff_guard.pipelines.families.spec import FamilySpec
from denoisers import MODELS, build, step
from small_runs import opened, sampled
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.usefixtures("traced_alone")


@torch._dynamo.config.patch(recompile_limit=1)
def test_every_block_of_a_unet_is_compiled() -> None:
    handle, messages = opened("svd", backend="inductor"), list[str]()
    with torch.inference_mode():
        reports = [sampled(handle, (64, 64, 2), steps=1, tell=messages.append)[1] for _ in range(2)]
    compiling = [line for line in messages if line.startswith("inductor")]
    assert [line.split(" · ")[0] for line in compiling] == [f"inductor: compiling block {n} of 9" for n in range(1, 10)]
    kinds = 5  # of blocks, each with its own code: more graphs mean several for one code
    assert reports[0].graphs is not None and reports[0].graphs > kinds and reports[1].graphs == 0


def channels_last(unet: torch.nn.Module) -> torch.nn.Module:
    """The same UNet, with the weights of its convolutions in that format."""
    for part in unet.modules():
        if isinstance(part, (torch.nn.Conv2d, torch.nn.Conv3d)):
            last = torch.channels_last if part.weight.ndim == 4 else torch.channels_last_3d
            part.weight.data = part.weight.data.contiguous(memory_format=last)
    return unet


def test_channels_last_unet_keeps_layout_and_compiles_one_graph_per_block() -> None:
    model, size, cpu = MODELS["svd-xt"], MODELS["svd-xt"].sizes["tiny"], torch.device("cpu")
    unet = channels_last(build(model, size, cpu, torch.float32))
    call = step(model, unet.config, size, cpu, torch.float32)
    module = compiled(unet, model.family.blocks, BackendChoice("inductor", ""))
    before = graphs_compiled()
    with torch.no_grad():
        made, expected = (block_outputs(which, model.family, call) for which in (module, unet))
        assert torch.equal(module(**call)[0], unet(**call)[0]), "in the same format, it is the same computation"
    assert graphs_compiled() - before == 5, "one for each block"
    assert [output.stride() for output in made] == [output.stride() for output in expected]
    assert any(output.is_contiguous(memory_format=torch.channels_last) for output in made)


def block_outputs(module: torch.nn.Module, family: FamilySpec, call: dict[str, Any]) -> list[torch.Tensor]:
    """All tensors that the blocks return."""
    outputs: list[torch.Tensor] = []
    parts = [module.get_submodule(name) for name in family.blocks]
    blocks = [block for part in parts for block in (part if isinstance(part, torch.nn.ModuleList) else [part])]
    handles = [b.register_forward_hook(lambda *given: outputs.extend(pytree.tree_leaves(given[-1]))) for b in blocks]
    module(**call)
    for handle in handles:
        handle.remove()
    return outputs
