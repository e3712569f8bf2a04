"""LoRA on real diffusers denoisers: as diffusers itself computes it, in a shallow copy that shares the weights."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import compiled
from comfyui_onediff_guard.pipelines.errors import BadLora
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.models.lora import Lora, with_loras
from comfyui_onediff_guard.precision.upcast import run_in_fp32
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_models import INDUCTOR, MODELS, apply_loras, by_diffusers, call, denoiser, protected, saved
from safetensors.torch import load_file
from tiers import by_tier
from torch._dynamo.utils import counters

# peft's, at each adapter after the first that diffusers loads
pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`", "ignore:Adapter 'default'")


@pytest.mark.parametrize("scale", [1.0, 0.25, -0.7, 3.0])
@pytest.mark.parametrize("name", MODELS)
def test_fp32_is_bit_equal_to_diffusers(name, scale, trained):
    make, family, pipeline = MODELS[name]
    model, inputs = make()
    path = trained(model)
    with_lora = apply_loras([path], [scale], model, family)
    found = with_lora(**inputs)[0]
    assert torch.equal(found, by_diffusers([path], [scale], model, pipeline, inputs))
    assert not torch.equal(found, model(**inputs)[0])


@torch.no_grad()
@pytest.mark.parametrize("in_layers", [False, True])
@pytest.mark.parametrize("scale", [1.0, -0.7, 40.0])
@pytest.mark.parametrize("name", MODELS)
def test_lora_in_protected_fp16_is_nearer_to_fp32_than_bf16(name, scale, in_layers, trained):
    make, family, _ = MODELS[name]
    model, inputs = make()
    path = trained(model)
    expected = apply_loras([path], [scale], model, family)(**inputs)[0]
    half = copy.deepcopy(model).half()
    given = {key: inputs[key].half() for key in ("hidden_states", "encoder_hidden_states")}
    run = protected(apply_loras([path], [scale], half, family), family, in_layers=in_layers)
    in_bf16 = {key: value.bfloat16() for key, value in given.items()}
    bf16 = apply_loras([path], [scale], copy.deepcopy(model).bfloat16(), family)(**inputs | in_bf16)[0].float()
    for _ in range(2):
        assert (run(**inputs | given)[0] - expected).norm() < (bf16 - expected).norm() / 3


@settings(max_examples=by_tier(8, 2), suppress_health_check=list(HealthCheck))
@given(scales=st.tuples(*[st.floats(-4, 4, width=32).filter(bool)] * 2), metadata=st.booleans())
def test_two_loras_each_have_their_own_scale(scales, metadata, trained):
    paths = [trained(metadata=metadata, r=3, lora_alpha=6), trained(seed=2, targets=("to_q", "ff.net.2"))]
    assert torch.equal(apply_loras(paths, scales)(**call)[0], by_diffusers(paths, list(scales)))


@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": 16},
        {"r": 8, "rank_pattern": {"to_q": 2, "transformer_blocks.1.attn1.to_v": 3}, "lora_alpha": 8},
        {"alpha_pattern": {"to_k": 1, "ff.net.2": 9}},
        {"use_rslora": True, "lora_alpha": 8},
        {"lora_bias": True},
        {"lora_dropout": 0.5},
        {"targets": ("patch_embed.proj", "proj_out", "norm1.linear", "ff.net.0.proj")},
    ],
    ids=lambda config: "-".join(config),
)
def test_scaling_in_header_of_file_is_applied_as_in_diffusers(config, trained):
    path = trained.__wrapped__(metadata=True, **config)  # dictionaries cannot be keys of its cache
    assert torch.equal(apply_loras([path], [0.5])(**call)[0], by_diffusers([path], [0.5]))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("small", ["lora_A", "lora_B"])
def test_matrix_too_small_for_fp16_has_its_effect_of_fp32(small, biased, trained, tmp_path):
    """Its alpha is as large: most of the LoRA would be lost with its small values."""
    path, factor = trained.__wrapped__(metadata=True, lora_alpha=4, lora_bias=biased), 2.0**17
    scaled = (f"{small}.weight", "lora_B.bias")
    tensors = {key: value / factor if key.endswith(scaled) else value for key, value in load_file(path).items()}
    settings = {"r": 4, "lora_alpha": 4 * factor, "lora_bias": biased}
    settings = {f"transformer.{key}": value for key, value in settings.items()}
    quiet = saved(tmp_path, tensors, {"lora_adapter_metadata": json.dumps(settings)})
    assert torch.equal(apply_loras([quiet], [1.0])(**call)[0], apply_loras([path], [1.0])(**call)[0])
    half, given = copy.deepcopy(denoiser).half(), dict(call)
    exact = run_in_fp32(apply_loras([path], [1.0], half), **given)[0]
    assert torch.allclose(run_in_fp32(apply_loras([quiet], [1.0], half), **given)[0], exact, atol=1e-5)


def test_matrix_of_denormal_numbers_acts_as_zero(trained, tmp_path):
    path = trained()
    tensors = load_file(path)
    first = next(key for key in tensors if "lora_B" in key)
    with_lora = apply_loras([saved(tmp_path, tensors | {first: torch.full_like(tensors[first], 1e-41)})], [1.0])
    nothing = apply_loras([saved(tmp_path, tensors | {first: torch.zeros_like(tensors[first])})], [1.0])
    assert torch.allclose(with_lora(**call)[0], nothing(**call)[0])


def test_no_lora_or_scale_0_returns_denoiser_itself(trained):
    assert with_loras(denoiser, [], COGVIDEOX) is denoiser
    assert apply_loras([trained(), trained(seed=2)], [0.0, -0.0]) is denoiser
    one, same = apply_loras([trained(), trained(seed=2)], [0.0, 0.5]), apply_loras([trained(seed=2)], [0.5])
    assert torch.equal(one(**call)[0], same(**call)[0])


def test_non_finite_scale_is_refused(tmp_path):
    for scale in (float("nan"), float("inf")):
        with pytest.raises(BadLora, match=rf"is {scale}, but must be a finite number"):
            Lora(tmp_path, scale)


def test_original_denoiser_is_not_changed(trained):
    def state():
        return {name: (id(m), type(m), {*m.__dict__}, [*m._modules]) for name, m in denoiser.named_modules()}

    paths = [trained(), trained(seed=2)]
    before, weights = state(), copy.deepcopy(denoiser.state_dict())
    expected, random = denoiser(**call)[0], torch.get_rng_state()
    with_lora = apply_loras(paths, [1.0, 2.0])
    assert torch.equal(torch.get_rng_state(), random), "a seed set by the user still holds"
    with_lora(**call)
    assert state() == before and list(denoiser.state_dict()) == list(weights)
    assert all(torch.equal(weights[name], tensor) for name, tensor in denoiser.state_dict().items())
    assert not hasattr(denoiser, "peft_config") and not denoiser._hf_peft_config_loaded
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in denoiser.modules())
    assert torch.equal(denoiser(**call)[0], expected)


def test_no_weight_is_copied_and_only_tensors_of_file_are_added(trained):
    path = trained()
    with torch.inference_mode():  # as in ComfyUI
        with_lora = apply_loras([path], [1.0])
    own = dict(denoiser.named_parameters())
    shared = {id(p): p.data_ptr() for p in with_lora.parameters() if any(p is q for q in own.values())}
    assert shared == {id(p): p.data_ptr() for p in own.values()}
    added = sum(p.numel() for p in with_lora.parameters() if id(p) not in shared)
    assert added == sum(tensor.numel() for tensor in load_file(path).values())
    assert not any(p.requires_grad or p.is_meta or p.is_inference() for p in with_lora.parameters())
    assert not any(module.training for module in with_lora.modules())


@pytest.mark.parametrize("target", [torch.float64, "meta"])
def test_moving_or_casting_weights_changes_both_copies(target, trained):
    model = copy.deepcopy(denoiser)
    with_lora = apply_loras([trained(model)], [1.0], model)
    model.to(target)
    for name, weight in model.named_parameters():
        layer, _, kind = name.rpartition(".")
        layer = with_lora.get_submodule(layer)
        assert getattr(getattr(layer, "base_layer", layer), kind) is weight


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp32_rerun_of_half_precision_lora_is_bit_equal_to_float(dtype, trained):
    half = copy.deepcopy(denoiser).to(dtype)
    with_lora = apply_loras([trained(), trained(seed=2)], [0.8, -1.5], half)
    assert {p.dtype for p in with_lora.parameters()} == {dtype}
    inputs = call | {name: call[name].to(dtype) for name in ("hidden_states", "encoder_hidden_states")}
    floats = call | {name: inputs[name].float() for name in ("hidden_states", "encoder_hidden_states")}
    expected = copy.deepcopy(with_lora).float()(**floats)[0]
    assert torch.equal(run_in_fp32(with_lora, **inputs)[0], expected)
    assert with_lora(**inputs)[0].dtype == dtype


def test_compiled_loras_apply_every_scale_and_share_one_graph(trained):
    torch.compiler.reset()
    before, outputs = counters["stats"]["unique_graphs"], []
    for scale in (1.0, -0.5, 2.5, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9, 1.1):  # more than dynamo's limit on recompiles
        with_lora = apply_loras([trained()], [scale])
        outputs.append(compiled(with_lora, COGVIDEOX.blocks, INDUCTOR)(**call)[0])
        torch.testing.assert_close(outputs[-1], with_lora(**call)[0], atol=1e-5, rtol=1e-5)
    assert min((a - b).abs().max() for i, a in enumerate(outputs) for b in outputs[:i]) > 1e-3
    assert counters["stats"]["unique_graphs"] - before == 1
