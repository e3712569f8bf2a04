"""Weights that a cast changed when a component was loaded: repaired, reported, or left unchanged."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.precision.learned_scales import LearnedProducts
from comfyui_onediff_guard.precision.loaded_weights import TRACE, DamagedByCast, make_consistent, mend_narrowed
from comfyui_onediff_guard.precision.shallow_copy import KeptInFp32, keep_in_fp32
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from diffusers.models.resnet import AlphaBlender
from host_reads import HostReads
from peft import LoraConfig, inject_adapter_in_model
from small_denoisers import build
from torch import nn
from transformers.models.clip.modeling_clip import CLIPVisionConfig, CLIPVisionEmbeddings
from transformers.models.t5.modeling_t5 import T5LayerNorm

# --- layers that must stay in fp32, and norms that reject it ----------------------------------------------------------


class Norm(nn.Module):
    """Accepts inputs in its weight's dtype only."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if x.dtype != self.weight.dtype:
            raise RuntimeError("expected scalar type Float but found Half")
        return x * self.weight


class Encoder(nn.Module):
    _keep_in_fp32_modules = ["wo"]

    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(4, 4)
        self.wo = nn.Linear(4, 4)
        self.norm = Norm(4)
        self.group_norm = nn.GroupNorm(2, 4)
        self.bare_norm = nn.LayerNorm(4, elementwise_affine=False)

    def as_loaded(self, dtype=torch.float16):
        self.to(dtype)
        self.wo.float()
        return self


class Strict(Encoder):
    _keep_in_fp32_modules, _keep_in_fp32_modules_strict = None, ["wo"]


class WithoutStrict(Encoder):
    _keep_in_fp32_modules_strict = None


class Plain(Encoder):
    _keep_in_fp32_modules = None


def dtypes(module):
    return {name: parameter.dtype for name, parameter in module.named_parameters()}


def test_consistent_component_is_unchanged():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        module = Plain().to(dtype)
        before = dtypes(module)
        assert make_consistent(module, dtype) == []
        assert dtypes(module) == before
        assert type(module.norm) is Norm, "nothing is fp32 here, so its norms never see fp32"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [Encoder, Strict, WithoutStrict])
def test_keep_in_fp32_modules_are_upcast_again(kind, dtype):
    """In bf16 only the strict ones, if the class has both lists."""
    found = make_consistent(module := kind().to(dtype), dtype)
    stays = kind is WithoutStrict and dtype is torch.bfloat16
    assert module.wo.weight.dtype == module.wo.bias.dtype == (dtype if stays else torch.float32)
    assert module.wi.weight.dtype == dtype
    put_back = f"'wo.weight' and 1 more restored to fp32, where {kind.__name__} keeps wo"
    assert found[:1] == ([] if stays else [put_back])


def test_weights_made_infinite_by_a_cast_are_rejected():
    module = Encoder()
    with torch.no_grad():
        module.wo.weight[0, :2] = torch.tensor([66246.0, -1e6])
    with pytest.raises(DamagedByCast, match=r"'wo\.weight' must stay in fp32.*2 of its values are NaN or infinite"):
        make_consistent(module.half(), torch.float16)


def test_norm_that_rejects_fp32_computes_in_fp32_and_returns_its_dtype():
    module = Encoder().as_loaded()
    x = torch.full((2, 4), 1e5)
    with pytest.raises(RuntimeError, match="Float but found Half"):
        module.norm(x)
    found = make_consistent(module, torch.float16)
    assert isinstance(module.norm, KeptInFp32)
    assert module.norm(x[:, :4] / 2).dtype == torch.float16
    assert torch.equal(module.norm(x / 2), (x / 2).half())
    assert any(line.startswith("'norm'") and "(Norm) refuses inputs in another dtype" in line for line in found)
    assert make_consistent(module, torch.float16) == [], "repaired only once"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_norm_class_is_tried_once_on_its_compute_device(device):
    asked = []

    class FusedNorm(Norm):
        """Rejects mixed dtypes on a device only, like a fused CUDA kernel."""

        def forward(self, x):
            asked.append(x.dtype)
            return super().forward(x) if x.is_meta else x

    module = Encoder().as_loaded()
    module.more = torch.nn.ModuleList(copy.deepcopy(module.norm) for _ in range(3))
    for norm in (module.norm, *module.more):
        norm.__class__ = FusedNorm
    with HostReads() as moved:
        make_consistent(module, torch.float16, torch.device(device))
    assert asked == [torch.float16, torch.float32]
    norms = (module.norm, *module.more)
    assert {isinstance(norm, KeptInFp32) for norm in norms} == {device == "meta"}, "the CPU accepts mixed dtypes"
    assert not moved.copies and not module.norm.weight.is_meta, "tried on an empty copy"


def test_parameters_in_another_dtype_are_reported():
    module = Plain().half()
    module.wi.float()
    assert make_consistent(module, torch.float16) == ["'wi.weight' and 1 more: in fp32, not in fp16 like the rest"]
    assert module.wi.weight.dtype == torch.float32


# --- weights beyond fp16's range --------------------------------------------------------------------------------------

VISION = CLIPVisionConfig(hidden_size=4, num_attention_heads=2, image_size=4, patch_size=2, num_channels=3)
LAYERS = {
    "linear": (lambda: nn.Linear(6, 4), torch.randn(2, 6)),
    "convolution": (lambda: nn.Conv2d(3, 4, 3), torch.randn(1, 3, 5, 5)),
    "convolution of a video": (lambda: nn.Conv3d(3, 4, 3), torch.randn(1, 3, 5, 5, 5)),
    "embedding": (lambda: nn.Embedding(8, 4), torch.tensor([[0, 5, 1]])),
    "layer norm": (lambda: nn.LayerNorm(6), torch.randn(2, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), torch.randn(2, 4, 5)),
    "T5's norm": (lambda: T5LayerNorm(6), torch.randn(2, 6)),
    "a module with weights of its own and layers": (lambda: CLIPVisionEmbeddings(VISION), torch.randn(1, 3, 4, 4)),
}


def loaded(module: Any, **values: float) -> tuple[Any, Any, list[Any]]:
    """(module in fp16 as loaded, function that reads the checkpoint, its calls). values: for first elements."""
    with torch.no_grad():
        for name, value in values.items():
            module.get_parameter(name.replace("__", ".")).view(-1)[0] = value
    stored = {name: parameter.clone() for name, parameter in module.named_parameters(remove_duplicate=False)}
    asked: list[Any] = []

    def read(names: Any) -> torch.Tensor:
        asked.append(names)
        return stored[names[0]]

    return module.half().eval().requires_grad_(False), read, asked


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_with_weight_beyond_fp16_computes_in_fp32_returns_fp16(kind):
    make, x = LAYERS[kind]
    torch.manual_seed(0)
    layer = make()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    own = next(iter(layer._parameters))
    exact = copy.deepcopy(layer).requires_grad_(False)
    for name, parameter in exact.named_parameters():
        parameter.copy_(parameter if name == own else parameter.half())
    exact.get_parameter(own).view(-1)[0] = -1e5
    half = x.half() if x.is_floating_point() else x
    right = exact(half.float() if x.is_floating_point() else x)

    module, stored, asked = loaded(nn.Sequential(layer), **{f"0__{own}": -1e5})
    (line,) = mend_narrowed(module, stored)
    assert line == f"'0.{own}' holds values up to 1e+05, beyond fp16: kept and computed in fp32"
    assert asked == [(f"0.{own}",)], "only this weight is read again"
    made = module(half)
    assert made.dtype == torch.float16 and torch.equal(made, right.half())
    assert torch.equal(run_in_fp32(module, half), right), "the rerun uses the full weight"
    assert isinstance(module[0], type(exact)) and make_consistent(module, torch.float16) == []
    assert next(module.parameters()).dtype == torch.float16, "diffusers' decoders read this dtype"


@pytest.mark.parametrize(("factor", "kept"), [(2.0**-10, False), (2.0**-16, True), (2.0**-24, True)])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
def test_weight_that_loses_digits_in_fp16_is_kept_in_fp32(kind: Any, factor: float, kept: bool) -> None:
    """It is a small part of the component's weights, and a later layer may amplify it."""
    torch.manual_seed(0)
    quiet = kind(8, 8, **({"kernel_size": 1} if kind is nn.Conv2d else {}))
    large = nn.Linear(1000, 1000)
    nn.init.normal_(quiet.weight, 0, 0.1)
    quiet.weight.data *= factor
    quiet.bias.data *= factor
    exact = copy.deepcopy(quiet)
    module, stored, asked = loaded(nn.ModuleDict({"quiet": quiet, "large": large}))
    lines = mend_narrowed(module, stored)
    assert ("large.weight",) not in asked and isinstance(module["quiet"], KeptInFp32) == kept
    if kept:
        (line,) = lines
        assert line.startswith("'quiet.weight' and 1 more hold values of") and "fp16 has few digits" in line
        assert all(torch.equal(module["quiet"].get_parameter(own), its) for own, its in exact.named_parameters())


def test_module_with_keyword_arguments_is_kept_in_fp32():
    spatial, temporal = torch.randn(2, 1, 4, 3, 5, 5).half()
    blender, stored, _ = loaded(AlphaBlender(1e5, "learned"))
    assert "'mix_factor' holds" in mend_narrowed(blender, stored)[0]
    made = blender(x_spatial=spatial, x_temporal=temporal, image_only_indicator=torch.zeros(1, 3))
    assert made.dtype == torch.float16 and torch.equal(made, spatial)


def test_tied_weight_is_read_once_and_stays_tied_in_fp32():
    tied: Any = nn.ModuleDict({"shared": nn.Embedding(8, 4), "used": nn.Embedding(8, 4)})
    tied["used"].weight = tied["shared"].weight
    module, stored, asked = loaded(tied, shared__weight=1e5)
    assert len(mend_narrowed(module, stored)) == 1
    assert asked == [("shared.weight", "used.weight")]
    shared, used = module["shared"], module["used"]
    assert used.weight is shared.weight and used.weight.dtype == torch.float32
    assert used(torch.tensor([1])).dtype == shared(torch.tensor([1])).dtype == torch.float16


@pytest.mark.parametrize("broken", [float("inf"), float("nan")])
def test_nonfinite_stored_weight_is_unchanged(broken):
    module, stored, _ = loaded(nn.Sequential(nn.Linear(6, 4)), **{"0__weight": broken})
    assert mend_narrowed(module, stored) == []
    assert not isinstance(module[0], KeptInFp32) and not module[0].weight.isfinite().all()


def test_weights_that_fit_are_not_read_again():
    module, stored, asked = loaded(drawn(), **{"0__weight": 65504.0})
    assert mend_narrowed(module, stored) == [] and asked == []
    assert {p.dtype for p in module.parameters()} == {torch.float16}


def test_module_kept_in_fp32_compiles_in_one_graph():
    module, stored, _ = loaded(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), **{"0__weight": 1e5})
    mend_narrowed(module, stored)
    x = torch.full((2, 6), 0.1).half()
    traced = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(traced(x), module(x))


@pytest.mark.parametrize("lora", [False, True])
def test_layer_kept_in_fp32_works_with_all_layers_scaled(lora):
    """With and without a LoRA, in the first step and later ones."""
    denoiser, call = build("CogVideoX-5B")
    if lora:
        config = LoraConfig(r=2, target_modules=["ff.net.2"], init_lora_weights=False, lora_bias=True)
        inject_adapter_in_model(config, denoiser)
        denoiser.requires_grad_(False)
    expected = denoiser(**call)[0]
    layer = denoiser.transformer_blocks[-1].ff.net[2]
    layer = getattr(layer, "base_layer", layer)
    keep_in_fp32(layer, torch.float32)
    denoiser.half()
    layer.float()
    layer.outside.data = layer.outside.data.half()
    products = LearnedProducts()
    for _ in range(3):
        made = products.run(denoiser, **call)[0]
        assert made.dtype == torch.float32
        assert (made - expected).abs().max() < 2e-3 * expected.abs().max()


# --- weights too small for fp16 ---------------------------------------------------------------------------------------


def drawn() -> Any:
    """A module with as few small weights as any model, too few to be reported."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.02)
    return module


def test_weights_too_small_for_fp16_are_reported():
    model = drawn()
    with torch.no_grad():
        model[1].weight[:150] *= 1e-4
    written = model[1].weight.detach()
    small = int(((written.abs() < 2**-14) & (written != 0)).sum())
    flushed = int(((written.half() == 0) & (written != 0)).sum())
    total = sum(parameter.numel() for parameter in model.parameters())
    module, stored, asked = loaded(model)
    (line,) = mend_narrowed(module, stored)
    assert small > 10 * TRACE * total and 0 < flushed < small and set(asked) == {("1.weight",)}
    assert line == (
        f"{small / total:.1%} of the weights are too small for fp16: {flushed:,} become 0 and {small - flushed:,} lose "
        "digits, most of them in '1.weight'; bf16 and fp32 hold them"
    )


def test_stored_zeros_are_not_counted():
    model = drawn()
    nn.init.zeros_(model[1].weight)
    module, stored, _ = loaded(model)
    assert mend_narrowed(module, stored) == []


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    ("values", "dtype", "asked"),
    [
        *(([1.0, 2.0**-16, 0.0] * 500, dtype, 1) for dtype in (E4M3, E5M2, torch.float16, torch.bfloat16)),
        ([1.0, float("nan")], E4M3, 0),  # damaged
    ],
)
def test_values_that_fp16_holds_exactly_are_not_counted(values, dtype, asked):
    """fp16's subnormals hold all digits of narrower formats, down to 2^-16."""
    stored, reads = torch.tensor(values).to(dtype), []
    layer = nn.Linear(len(values), 1, bias=False).requires_grad_(False).half()
    layer.weight.copy_(stored.half())
    assert mend_narrowed(layer, lambda names: reads.append(names) or stored) == []
    assert not asked or set(reads) == {("weight",)}


@pytest.mark.parametrize("inputs", [64, 96, 256])
def test_small_weights_in_some_columns_are_reported(inputs):
    """The row length may equal the sampling distance of the check."""
    layer = nn.Linear(inputs, 4096, bias=False)
    with torch.no_grad():
        layer.weight.normal_(0, 0.02)[:, 1 : inputs // 2] *= 1e-4
    small = ((layer.weight.abs() < 2**-14) & (layer.weight != layer.weight.half())).double().mean().item()
    module, stored, _ = loaded(layer)
    (line,) = mend_narrowed(module, stored)
    assert small > 0.4 and line.startswith(f"{small:.1%} of the weights are too small for fp16")
