"""The tracer, on diffusers' own transformers and on networks drawn at random: right or refused, never wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.tracing import NEAR, NotFound, discover, find_stream
from comfyui_onediff_guard.precision.wide import with_wide_stream
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from small_denoisers import MODELS, build, in_dtype
from tiers import drawn
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS = 32, 6


@dataclass(frozen=True)
class Shape:
    """What a drawn network is like."""

    blocks: int = 3
    norm: str = "layer"  # or "rms"
    branch: str = "mlp"  # or "attention", "convolution"
    sum: str = "x + b"  # or "b + x", "in place", "addcmul", "slices"
    gate: str = "none"  # or "parameter", "computed"
    sandwich: bool = False  # a norm behind each branch, too
    streams: int = 1
    start: str = "linear"  # or "convolution", or "outer": a sum of two, each spread over the other
    positions: bool = False
    clips: bool = False
    unnormed: bool = False  # a layer in each block reads the stream as it is
    bypassed: bool = False  # the first block's input is added once more behind the last
    shared: bool = False  # all blocks are one


SHAPES = st.builds(
    Shape,
    blocks=st.integers(1, 5),
    norm=st.sampled_from(["layer", "rms"]),
    branch=st.sampled_from(["mlp", "attention", "convolution"]),
    sum=st.sampled_from(["x + b", "b + x", "in place", "addcmul", "slices"]),
    gate=st.sampled_from(["none", "parameter", "computed"]),
    sandwich=st.booleans(),
    streams=st.integers(1, 2),
    start=st.sampled_from(["linear", "convolution", "outer"]),
    positions=st.booleans(),
    clips=st.booleans(),
    unnormed=st.booleans(),
    bypassed=st.booleans(),
    shared=st.booleans(),
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


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.float() - expected).norm() / expected.norm()).item()


def network(shape: Shape, hot: tuple[str, ...] = ()) -> Any:
    torch.manual_seed(0)
    module = Drawn(shape).eval().requires_grad_(False)
    for name in dict.fromkeys(hot):
        weight: Any = module.get_submodule(name).weight
        weight.mul_(2e5).clamp_(-6e4, 6e4)
    return module


def step(dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    x, t = torch.randn(2, TOKENS, 4).to(dtype), torch.randn(2, 4).to(dtype)
    return lambda module: module(x.clone(), t)


def wide_run(shape: Shape, found: Any, hot: tuple[str, ...] = ()) -> float:
    expected = step(torch.float32)(network(shape, hot))
    shell = with_wide_stream(network(shape, hot).half(), found.names, torch.float16)
    return error(step(torch.float16)(shell), expected)


@settings(max_examples=drawn(400, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES)
def test_what_is_found_in_a_drawn_network_is_right_and_else_it_is_refused(shape: Shape) -> None:
    try:
        found = find_stream(network(shape).half(), step(torch.float16), torch.float16)
    except NotFound as why:
        event(f"refused: {str(why).partition(':')[0][:60]}")
        summed_in_half = shape.start == "outer" and shape.sum == "in place"
        if not (shape.unnormed or shape.blocks == 1 or shape.bypassed or summed_in_half):
            raise AssertionError("nothing stands in the way") from why
        return
    event("found")
    assert wide_run(shape, found) < 5e-3
    assert wide_run(shape, found, hot=found.writers) < NEAR


@pytest.mark.parametrize("name", MODELS)
def test_it_finds_what_the_families_name(name: str) -> None:
    denoiser, call = build(name)
    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    found = discover(half, lambda module: module(**half_call))
    stream = MODELS[name].family.stream
    assert stream and set(found.names) == set(stream.writer_names(half))


@pytest.mark.parametrize("name", ["CogVideoX-2B", "CogVideoX-1.5-5B-I2V", "CogView3-Plus"])
def test_and_proves_it(name: str) -> None:
    denoiser, call = build(name)
    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    assert find_stream(half, lambda module: module(**half_call), torch.float16).writers


def test_a_network_that_takes_its_dtype_from_the_stream_is_refused() -> None:
    """CogView4's norms hand on what they are given: half precision has to begin behind them."""
    denoiser, call = build("CogView4")
    half, half_call = denoiser.half(), in_dtype(call, torch.float16)
    with pytest.raises(NotFound, match="does not run with a wide stream: Expected query, key, and value"):
        find_stream(half, lambda module: module(**half_call), torch.float16)


def test_a_layer_that_reads_the_stream_without_a_norm_is_refused() -> None:
    shape = Shape(unnormed=True)
    with pytest.raises(NotFound, match="a layer reads it without a norm"):
        find_stream(network(shape).half(), step(torch.float16), torch.float16)


def test_a_network_without_a_stream_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).half().requires_grad_(False)
    with pytest.raises(NotFound, match="no chain of 3 sums"):
        find_stream(module, lambda net: net(torch.randn(2, 4).half()), torch.float16)


def test_a_stream_may_start_with_a_sum_of_two_that_are_spread_over_each_other() -> None:
    found = find_stream(network(Shape(start="outer")).half(), step(torch.float16), torch.float16)
    assert set(found.writers) == {f"blocks.{block}.{branch}.out" for block in range(3) for branch in range(2)}


def test_nothing_is_left_on_the_network() -> None:
    module = network(Shape()).half()
    before = {name: (id(part), type(part), dict(part._forward_hooks)) for name, part in module.named_modules()}
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    find_stream(module, step(torch.float16), torch.float16)
    assert {name: (id(part), type(part), dict(part._forward_hooks)) for name, part in module.named_modules()} == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
