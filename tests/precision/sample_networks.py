"""Networks to test scaled products on, random ones and diffusers' own; and checks of their error against fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import torch
from comfyui_onediff_guard.precision.planned_products import Scale
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from guards import error
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS = 32, 6


class Shape(NamedTuple):
    """The structure of a random network."""

    blocks: int
    norm: str
    branch: str
    sum: str
    gate: str
    sandwich: bool  # a norm after each branch too
    streams: int
    start: str  # "outer": a sum of two tensors that broadcast against each other
    positions: bool
    clips: bool
    unnormed: bool  # a layer in each block reads the stream without a norm
    bypassed: bool  # the first block's input is added again after the last block
    shared: bool  # all blocks are the same module


SHAPES = st.builds(
    Shape,
    blocks=st.integers(1, 5),
    norm=st.sampled_from(["layer", "rms"]),
    branch=st.sampled_from(["mlp", "attention", "convolution"]),
    sum=st.sampled_from(["x + b", "b + x", "in place", "addcmul", "slices"]),
    gate=st.sampled_from(["none", "parameter", "computed"]),
    streams=st.integers(1, 2),
    start=st.sampled_from(["linear", "convolution", "outer"]),
    **dict.fromkeys(["sandwich", "positions", "clips", "unnormed", "bypassed", "shared"], st.booleans()),
)


class Branch(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        norm = nn.LayerNorm if shape.norm == "layer" else nn.RMSNorm
        self.shape = shape
        self.norm = norm(WIDTH)
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.last = nn.Conv1d(3 * WIDTH, WIDTH, 3, padding=1) if shape.branch == "convolution" else None
        self.out = nn.Linear(WIDTH if shape.branch == "attention" else 3 * WIDTH, WIDTH)
        self.behind = norm(WIDTH) if shape.sandwich else nn.Identity()
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.gates = nn.Parameter(torch.rand(WIDTH))
        self.reads = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.first(self.norm(x))
        if self.shape.branch == "attention":
            h = F.scaled_dot_product_attention(*h.chunk(3, -1))
        else:
            h = F.gelu(h)
        if self.shape.unnormed:
            h = h + F.pad(torch.tanh(self.reads(x)), (0, h.shape[-1] - WIDTH))
        b = self.out(h) if self.last is None else self.last(h.transpose(1, 2)).transpose(1, 2)
        return self.added(x, self.behind(b), time)

    def added(self, x: torch.Tensor, b: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        gate = {"none": None, "parameter": self.gates, "computed": self.gate(time)[:, None]}[self.shape.gate]
        if self.shape.sum == "addcmul":
            return torch.addcmul(x, b, torch.ones_like(b[:1, :1]) if gate is None else gate.to(b.dtype))
        b = b if gate is None else b * gate
        if self.shape.sum == "in place":
            x += b
            return x
        if self.shape.sum == "slices":
            x = x.clone()
            x[:, : TOKENS // 2] += b[:, : TOKENS // 2]
            x[:, TOKENS // 2 :] += b[:, TOKENS // 2 :]
            return x
        return x + b if self.shape.sum == "x + b" else b + x


class Drawn(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        convolves = shape.start == "convolution"
        self.embed = nn.Conv1d(4, WIDTH, 1) if convolves else nn.Linear(4, WIDTH)
        self.time = nn.Linear(4, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        branches = [nn.ModuleList(Branch(shape) for _ in range(2)) for _ in range(shape.blocks)]
        self.blocks = nn.ModuleList([branches[0]] * shape.blocks if shape.shared else branches)
        self.norm = nn.LayerNorm(WIDTH)
        self.final = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        time = F.silu(self.time(t))
        streams = [self.stream(part, time) for part in x.chunk(self.shape.streams)]
        return self.final(self.norm(torch.cat(streams)))

    def stream(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if isinstance(self.embed, nn.Linear) else self.embed(x.transpose(1, 2)).transpose(1, 2)
        if self.shape.start == "outer":
            x = x.mean(1, keepdim=True) + self.positions
        elif self.shape.positions:
            x = x + self.positions
        first = x.clone()
        for block in self.blocks:
            for branch in block.children():
                x = branch(x, time[: len(x)])
                if self.shape.clips and x.dtype == torch.float16:
                    x = x.clip(-65504, 65504)
        return x + first if self.shape.bypassed else x


def network(shape: Shape, hot: tuple[str, ...] = ()) -> Any:
    torch.manual_seed(0)
    module = Drawn(shape).eval().requires_grad_(False)
    for name in dict.fromkeys(hot):
        weight: Any = module.get_submodule(name).weight
        weight.mul_(2e5).clamp_(-6e4, 6e4)
    return module


def scaled(module: Any, call: Callable[[Any], Any], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return run_in(ScaledHalfMatmulMode(dtype), call, (module,), {})


PLACES = ("embed", "final", "first", "last", "out")


# --- diffusers' own ---------------------------------------------------------------------------------------------------


HOT = ("nothing", "first", "middle", "last but one")


def heated(name: str, hot: str) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A diffusers network with one layer whose output overflows fp16, and a function that makes its inputs."""
    config, inputs = NETWORKS[name]
    torch.manual_seed(1)
    module = getattr(diffusers, name)(**config).eval().requires_grad_(False)
    layers = [layer for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    for index in {"nothing": [], "first": [0], "middle": [len(layers) // 2], "last but one": [-2]}[hot]:
        layers[index].weight.mul_(3e5).clamp_(-6e4, 6e4)
    return module, lambda: inputs() | {"return_dict": False}


def inputs_of_next_step(call: dict[str, Any], gain: float) -> dict[str, Any]:
    """Inputs of another step: other values, `gain` times as large, at another timestep."""
    changed = {
        name: value * gain if name != "img_ids" and is_floating(value) else value for name, value in call.items()
    }
    return changed | {"timestep": torch.as_tensor(call["timestep"]) / 3}


def is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def check_steps(run: Any, module: Any, inputs: Callable[[], dict[str, Any]], *, healthy: bool) -> None:
    """Each step is four times nearer to fp32 than bf16; a healthy one is as near as plain fp16."""
    for gain in (1.0, 0.2, 1.0, 4.0):
        step = inputs_of_next_step(inputs(), gain)

        def call(network: Any, step: dict[str, Any] = step) -> torch.Tensor:
            return network(**step)[0]

        exact, found = run_in_fp32(call, module), run(**step)
        assert found.dtype is torch.float32
        assert error(found, exact) <= error(scaled(module, call, torch.bfloat16), exact) / 4
        if healthy and module.dtype is torch.float16:
            half = {key: value.half() if is_floating(value) else value for key, value in step.items()}
            assert error(found, exact) <= 1.1 * error(module(**half)[0].float(), exact)


def check_scales(scales: dict[Any, Scale], *, healthy: bool) -> None:
    """Nearly all layers run in fp16; with one overflowing layer, some do."""
    plain = sum(scale.fp16 for scale in scales.values()) / len(scales)
    assert plain > (0.95 if healthy else 0.3)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


NETWORKS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {  # class → config and inputs
    "SD3Transformer2DModel": (
        {"sample_size": 8, "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 2,
         "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32,
         "pooled_projection_dim": 64},
        lambda: {"hidden_states": draw(2, 4, 8, 8), "encoder_hidden_states": draw(2, 7, 32),
                 "pooled_projections": draw(2, 64), "timestep": torch.tensor([500.0, 500.0])},
    ),
    "FluxTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
         "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8]},
        lambda: {"hidden_states": draw(1, 16, 4), "encoder_hidden_states": draw(1, 7, 32),
                 "pooled_projections": draw(1, 32), "timestep": torch.tensor([0.5]), "img_ids": draw(16, 3).round(),
                 "txt_ids": torch.zeros(7, 3)},
    ),
    "WanTransformer3DModel": (
        {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
         "out_channels": 4, "text_dim": 16, "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32},
        lambda: {"hidden_states": draw(1, 4, 2, 16, 16), "encoder_hidden_states": draw(1, 7, 16),
                 "timestep": torch.tensor([500.0])},
    ),
    "PixArtTransformer2DModel": (
        {"sample_size": 8, "num_layers": 2, "patch_size": 2, "attention_head_dim": 8, "num_attention_heads": 3,
         "caption_channels": 32, "in_channels": 4, "cross_attention_dim": 24, "out_channels": 8},
        lambda: {"hidden_states": draw(2, 4, 8, 8), "encoder_hidden_states": draw(2, 8, 32),
                 "timestep": torch.tensor([500.0, 500.0]),
                 "added_cond_kwargs": {"aspect_ratio": None, "resolution": None}},
    ),
    "SanaTransformer2DModel": (
        {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8,
         "num_attention_heads": 1, "num_cross_attention_heads": 2, "cross_attention_head_dim": 4,
         "cross_attention_dim": 8, "caption_channels": 8, "sample_size": 32},
        lambda: {"hidden_states": draw(1, 4, 32, 32), "encoder_hidden_states": draw(1, 8, 8),
                 "timestep": torch.tensor([500.0])},
    ),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8,
         "cross_attention_dim": 16, "num_layers": 1, "caption_channels": 16},
        lambda: {"hidden_states": draw(2, 128, 4), "encoder_hidden_states": draw(2, 16, 16),
                 "timestep": torch.tensor([500.0, 500.0]), "encoder_attention_mask": torch.ones(2, 16).bool(),
                 "num_frames": 2, "height": 8, "width": 8},
    ),
    "UNet2DConditionModel": (
        {"block_out_channels": (4, 8), "norm_num_groups": 4, "cross_attention_dim": 8, "attention_head_dim": 2,
         "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "layers_per_block": 1, "sample_size": 16,
         "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        lambda: {"sample": draw(2, 4, 16, 16), "timestep": torch.tensor(500), "encoder_hidden_states": draw(2, 7, 8)},
    ),
}  # fmt: skip
