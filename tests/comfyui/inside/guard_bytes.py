"""Bytes and kernels beside products in a later step of overflow protection, in ComfyUI's own networks of published
width with two blocks of each kind, counted on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import module
from native_layouts import FLUX, QWEN_IMAGE, SDXL, WAN, Z_IMAGE
from native_models import LAYOUTS, SUPPORTED
from native_table import Cells, table
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

META = torch.device("meta")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "attention"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
Sizes = dict[str, Any]
WIDE: dict[str, tuple[Sizes, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {  # sizes, latents, context, others
    "sdxl": (
        SDXL
        | {"model_channels": 320, "num_head_channels": 64, "context_dim": 2048, "channel_mult": [1, 2, 4]}
        | {"num_res_blocks": [2, 2, 2], "transformer_depth": [0, 0, 2, 2, 10, 10], "transformer_depth_middle": 10}
        | {"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10]},
        (2, 4, 128, 128),
        (2, 77, 2048),
        {"y": (2, 2816)},
    ),
    "flux": (
        FLUX
        | {"hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "axes_dim": [16, 56, 56]}
        | {"context_in_dim": 4096, "vec_in_dim": 768},
        (1, 16, 128, 128),
        (1, 512, 4096),
        {"y": (1, 768)},
    ),
    "qwen_image": (
        QWEN_IMAGE | {"attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584}
        | {"axes_dims_rope": (16, 56, 56)},
        (2, 16, 1, 128, 128),
        (2, 128, 3584),
        {},
    ),
    "z_image": (
        Z_IMAGE | {"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "multiple_of": 256, "cap_feat_dim": 2560},
        (2, 16, 128, 128),
        (2, 128, 2560),
        {"num_tokens": 128},
    ),
    "wan": (
        WAN | {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "text_dim": 4096, "freq_dim": 256},
        (2, 16, 21, 60, 104),
        (2, 512, 4096),
        {},
    ),
}  # fmt: skip
BYTES, KERNELS, T4 = "bytes beside products, × plain fp16's", "kernels, ×", "a step on a T4, ×"
HEAD = """\
What a later step reads, writes and starts, beside plain fp16's. On a T4: products at 40 TFLOP/s, then all else at
300 GB/s."""
cells = table("bytes", HEAD, [BYTES, KERNELS, T4])


class Counted(TorchDispatchMode):
    """Count kernels and bytes: each kernel reads its inputs once and writes its outputs; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        name = func._schema.name.partition("::")[2]
        if not view and name not in FREE:
            self.kernels += 1
            tensors = {id(each): each for each in pytree.tree_leaves((args, kwargs, made)) if torch.is_tensor(each)}
            beside = (min(each.numel() * each.itemsize, each.untyped_storage().nbytes()) for each in tensors.values())
            self.bytes += 0 if name in PRODUCTS else sum(beside)
        return made


def counted(step: Callable[[], Any]) -> Counted:
    with Counted() as found, module("precision.activation_estimate").FusedAttention(lambda *_, **__: False):
        step()
    return found


def pytorch_attention(_chosen: Any, *args: Any, **kwargs: Any) -> Any:
    return import_module("comfy.ldm.modules.attention").attention_pytorch(*args, **kwargs)


@pytest.mark.parametrize("family", [name for name in WIDE if name in LAYOUTS])
def test_protected_step_costs_little_more_than_plain_fp16(cells: Cells, family: str) -> None:
    sizes, latents, context, further = WIDE[family]
    layout = replace(LAYOUTS[family], sizes=sizes)
    config = getattr(SUPPORTED, layout.config)(layout.settings())
    config.unet_config |= {name: sizes[name] for name in config.unet_extra_config.keys() & sizes.keys()}
    config.set_inference_dtype(torch.float16, None)
    model = config.get_model({}, "", device=META).eval().requires_grad_(False).to(META)
    given = {n: torch.empty(each, device=META) if isinstance(each, tuple) else each for n, each in further.items()}
    given["c_crossattn"] = torch.empty(context, device=META)
    x, sigma = torch.empty(latents, device=META), torch.ones(latents[0], device=META)
    calls, layers = module("comfyui_host.model_calls"), module("comfyui_host.rerun_layers")

    def plain() -> Any:
        return model._apply_model(x, sigma, transformer_options={calls.ATTENTION_OVERRIDE: pytorch_attention}, **given)

    def with_fp32_products() -> Any:
        with layers.products_in_fp32(model.diffusion_model), layers.weights_as_stored():
            return plain()

    run_in, planned = module("precision.upcast").run_in, module("precision.planned_products")
    with torch.no_grad():
        as_it_is, first = counted(plain), module("precision.learned_scales").LearningMode()
        run_in(first, with_fp32_products, (), {})
        plan = {key: planned.Scale(fp16=key not in first.pattern.in_place) for key, _ in first.peaks.calls}
        later = planned.PlannedMode(plan, first.pattern)
        protected = counted(lambda: run_in(later, with_fp32_products, (), {}))
        with FlopCounterMode(display=False) as flops:
            plain()
    floor = flops.get_total_flops() / 40e12
    ratios = {
        BYTES: protected.bytes / as_it_is.bytes,
        KERNELS: protected.kernels / as_it_is.kernels,
        T4: (floor + protected.bytes / 300e9) / (floor + as_it_is.bytes / 300e9),
    }
    assert ratios[KERNELS] <= 1.5 and ratios[T4] <= 1.15
    for name, ratio in ratios.items():
        cells[family, name] = f"{ratio:.2f}"
