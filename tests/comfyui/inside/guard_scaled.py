"""NaN Guard (native) with a chosen precision, and its overflow protection, on every family of ComfyUI's own models."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from guard_beside import compiled_by_comfyui, lora_of_a_prompt, lora_on, lowvram
from in_comfyui import error_of, guarded, module, on, same, texts
from native_models import LAYOUTS, Layout, distance, make_model, prompts, sample, with_fp32_twin
from native_table import Cells, figures, table

torch.set_num_threads(1)  # the models are so small that threads cost more than they gain
WEIGHTS = {  # dtype, and the dtype they are cast to; ComfyUI runs models without fp16 support like the second
    "fp16": (torch.float16, None),
    "bf16 in fp32": (torch.bfloat16, torch.float32),
}
BF16 = {"bf16": (torch.bfloat16, None)}
HEALTHY = "healthy"
HEATS = (HEALTHY, "hot in the stream", "hot inside")
FEW = ("sd15", "flux", "qwen_image", "wan")
STEPS = 4  # later steps use the scales that the first step found
HOTTEST = 6e4  # largest |w| of a hot layer; fp16's maximum is 65504
MODULATES = re.compile("mod|norm|emb|ada")  # layer names: these do not write to the stream, nor enlarge it
SQUARE = dict.fromkeys(("Lumina2", "ZImage"), "feed_forward.w2.weight")  # square layers that write to the stream
AS_PLAIN = {"kandinsky5": 1.2}  # times plain fp16's error: later steps run most layers in plain fp16
AS_PREPARED = {("sensenova", "bf16 in fp32"): 1.2}  # times ComfyUI's error: it prepares a prompt's keys in bf16
PROTECTED = "overflow protection; "
LARGE = 256  # values: more than a gate has here
# used once or twice per step, or in few families: outside blocks, or products written by hand
UPCAST = {"mul", "to", "tanh", "sigmoid", "einsum", "bmm", "baddbmm", "matmul", "index_select", "clip", "embedding"}
UPCAST |= {"add", "where"}
HEAD = """\
How far from fp32 the plain run is / the guard's with precision fp16, overflow protection / the guard's
with precision bf16. Distances are norms, as shares of the norm. Weights in bf16 are computed in fp32 by the plain
run."""
cells = table("scaled", HEAD, [f"{weights}, {heat}" for weights in WEIGHTS for heat in HEATS])
few = pytest.mark.parametrize("family", FEW)


def hot(layout: Layout, heat: str) -> Layout:
    """Return a layout whose block has an overflowing layer: in the stream (a layer with fewer outputs than inputs), or
    inside the block (a layer with more outputs than inputs)."""
    stored = make_model(layout).model.diffusion_model.get_submodule(layout.block).state_dict()
    layers = [name for name, weight in stored.items() if weight.ndim > 1 and name.endswith("weight")]
    layers = [name for name in layers if not MODULATES.search(name)]

    def grows(name: str) -> float:
        return stored[name].shape[0] / stored[name].shape[1]

    inside = heat == "hot inside"
    chosen = max(layers, key=grows) if inside else SQUARE.get(layout.config) or min(reversed(layers), key=grows)
    hottest = HOTTEST / stored[chosen].abs().max().item()
    return replace(layout, hot=f"{layout.block}.{chosen.removesuffix('.weight')}", times=hottest)


def run(patcher: Any, precision: str = "fp16", **policy: Any) -> torch.Tensor:
    """Sample with a guard. Its report is in texts[-1]."""
    return sample(guarded(patcher, precision=precision, **policy), steps=STEPS)


def check_said(*parts: str) -> None:
    """Check that the report has no reruns, and contains these parts."""
    assert " fine." in texts[-1] and all(part in texts[-1] for part in parts), texts[-1]


def weights_of(patcher: Any) -> list[torch.Tensor]:
    return [weight.clone() for weight in patcher.model.state_dict().values()]


def check_protected(
    layout: Layout, heat: str, weights: str, *, as_plain: float = 1.0, as_prepared: float = 0.0
) -> tuple[float, float, float]:
    """Check that a protected run beats bf16, without a rerun, and leaves the model as it was. Return the distances from
    fp32: plain, protected, in bf16. Without guidance, which cancels equal rounding errors of both halves, and more of
    them in coarser precisions.

    as_plain, as_prepared: factors for the plain run's error, which bound that of a healthy run, and that of any run.
    """
    layout = replace(layout if heat == HEALTHY else hot(layout, heat), cfg=1.0)
    patcher, exact = with_fp32_twin(layout, *WEIGHTS[weights], hot=heat != HEALTHY)
    stored = weights_of(patcher)
    plain, reference = (sample(model, steps=STEPS) for model in (patcher, exact))
    off = partial(distance, layout, exact=reference)
    protected = off(run(patcher))
    check_said("fp16, as you chose", PROTECTED)
    in_bf16 = off(run(patcher, "bf16"))
    assert 0 < protected <= max(in_bf16 / 4, as_prepared * off(plain))
    assert same(plain, sample(patcher, steps=STEPS)) and all(map(same, stored, weights_of(patcher)))
    if weights == "fp16" and heat == HEALTHY:
        assert protected <= as_plain * off(plain)
    elif weights == "fp16":
        assert math.isnan(off(plain)) or off(plain) > 5e-3
    return off(plain), protected, in_bf16


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("family", LAYOUTS)
def test_protected_run_beats_bf16_without_rerun(cells: Cells, family: str, heat: str, weights: str) -> None:
    bounds = {"as_plain": AS_PLAIN.get(family, 1.0), "as_prepared": AS_PREPARED.get((family, weights), 0.0)}
    errors = check_protected(LAYOUTS[family], heat, weights, **bounds)
    cells[family, f"{weights}, {heat}"] = figures(*errors, between=" / ")


@pytest.mark.parametrize("family", LAYOUTS)
def test_later_steps_upcast_large_inputs_of_few_functions_only(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upcast tensors take twice the memory traffic, and ComfyUI's kernels only accept half precision."""
    mode, upcast = module("precision.upcast").Fp32Mode, set[str]()
    compute = mode.compute

    def record(self: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dtype is torch.float16]
        if type(self).__name__ == "PlannedMode" and any(each.numel() >= LARGE for each in tensors):
            upcast.add(func.__name__)
        return compute(self, func, args, kwargs)

    monkeypatch.setattr(mode, "compute", record)
    run(make_model(replace(LAYOUTS[family], cfg=1.0)))
    check_said(PROTECTED)
    assert upcast - {"__get__"} <= UPCAST


def check_learned(patcher: Any, exact: Any, check: Callable[[str], None]) -> None:
    """Run one guard twice on a model that fails in fp16, and later a new guard.

    check: checks the texts of each run.
    """
    reference = sample(exact, steps=STEPS)
    learner = guarded(patcher, scope="learned")
    for time in ("first", "second", "after a restart"):
        learner = guarded(patcher, scope="learned") if time == "after a restart" else learner
        texts.clear()
        assert distance(patcher.model.layout, sample(learner, steps=STEPS), reference) <= 5e-3
        check(time)


@pytest.mark.parametrize("family", LAYOUTS)
def test_scope_learned_reruns_once_then_protects_every_step(family: str) -> None:
    def check(time: str) -> None:
        *record, report = texts
        if time == "first":
            assert len(record) == 1 and record[0].startswith("call 1: NaN or infinite in fp16")
            assert PROTECTED in report and f"{STEPS} steps, 1 recomputed in fp32." in report
        else:
            assert not record
            check_said(PROTECTED)
            assert ("from a profile: " in report) == (time == "after a restart")

    check_learned(*with_fp32_twin(family, hot=True), check)


def test_learned_profile_applies_only_to_same_weights() -> None:
    overflows, healthy = make_model("sd15", hot=True), make_model("sd15")
    plain = sample(healthy, steps=STEPS)

    def learning(patcher: Any, around: Any = nullcontext) -> torch.Tensor:
        with around():
            return run(patcher, "inherit", scope="learned")

    learning(overflows)
    assert f"{STEPS} steps, 1 recomputed in fp32." in texts[-1] and "profile" not in texts[-1]
    assert same(plain, learning(healthy)) and "profile" not in texts[-1]
    learning(lora_on(overflows))
    assert f"{STEPS} steps, 1 recomputed in fp32." in texts[-1] and "profile" not in texts[-1]
    fresh, another, again = (make_model("sd15", hot=True) for _ in range(3))
    known = [(lora_on(fresh), nullcontext), (lora_on(another), lowvram), (again, lowvram), (overflows, nullcontext)]
    known += [(compiled_by_comfyui(each, "diffusion_model.out"), nullcontext) for each in (again, lora_on(another))]
    for patcher, around in known:
        learning(patcher, around)
        check_said(PROTECTED, "from a profile: ")


def test_each_model_of_a_sampling_learns_its_own_profile() -> None:
    nodes, samplers = (import_module(name) for name in ("comfy_extras.nodes_custom_sampler", "comfy.samplers"))
    if not hasattr(nodes, "Guider_DualModel"):
        pytest.skip("this ComfyUI samples with one model")
    healthy, overflows = make_model("sd15"), make_model("sd15", hot=True)
    for runs in range(2):
        guider = nodes.Guider_DualModel(guarded(healthy, scope="learned"), overflows)
        guider.set_conds(*prompts(LAYOUTS["sd15"]))
        guider.set_cfg(3.0)
        noise = torch.randn(LAYOUTS["sd15"].latents, generator=torch.Generator().manual_seed(5))
        with torch.inference_mode():
            sigmas = torch.linspace(1.0, 0.0, STEPS + 1)
            guider.sample(noise, noise * 0, samplers.ksampler("euler", {}), sigmas, disable_pbar=True, seed=1)
        assert runs or f"{STEPS} steps, 1 of {2 * STEPS} calls recomputed in fp32." in texts[-1]
    check_said(PROTECTED, "from a profile: ")


def test_profile_is_used_at_any_strength_of_prompt_lora() -> None:
    for strength in (0.3, 0.5):
        layer = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_v"
        hooks = lora_of_a_prompt(layer, inputs=64, strength=strength)
        sample(guarded(make_model("sd15", hot=True), scope="learned"), hooks=hooks)
    check_said(PROTECTED, "from a profile: ")


@pytest.mark.parametrize("weights", WEIGHTS | BF16)
@few
def test_each_precision_computes_in_its_dtype(family: str, weights: str) -> None:
    layout = LAYOUTS[family]
    patcher, exact = with_fp32_twin(layout, *(WEIGHTS | BF16)[weights])
    plain, reference = (sample(model, steps=STEPS) for model in (patcher, exact))
    with on("sm75"):
        assert 0 < distance(layout, run(patcher, "auto"), reference) <= 5e-3
    check_said("has no native bf16", PROTECTED)
    assert ("without the guard, ComfyUI would use fp32" in texts[-1]) == (weights == "bf16 in fp32")
    for card in ("sm80", "sm90", "cpu"):
        with on(card):
            assert same(run(patcher, "auto"), plain)
        check_said(", which ComfyUI chose for ")
        assert PROTECTED not in texts[-1]
    as_it_is = {"fp16": "fp16 (plain)", "bf16": "bf16", "bf16 in fp32": "fp32"}[weights]
    with on("cpu"):
        for precision in ("inherit", "bf16", "fp16 (plain)", "fp32"):
            if precision == "fp16 (plain)" != as_it_is:
                error = error_of(lambda: run(patcher, "fp16 (plain)"))
                assert error.startswith("BadInput: ComfyUI runs") and "--fp16-unet" in error
                continue
            made = run(patcher, precision)
            check_said()
            assert same(made, plain) == (precision in ("inherit", as_it_is))
            off = distance(layout, made, reference)
            assert precision != "fp32" or off <= 1e-5
            assert precision != "bf16" or 1e-3 <= off <= 3e-2


@pytest.mark.parametrize("option", ["fp32_unet", "force_fp32"])
def test_auto_is_fp32_with_comfyuis_fp32_flags(option: str) -> None:
    patcher = make_model("flux", *WEIGHTS["bf16 in fp32"])
    with on("sm75"), patch.object(import_module("comfy.cli_args").args, option, True, create=True):
        made = run(patcher, "auto")
    assert same(made, sample(patcher, steps=STEPS))
    check_said("fp32 for ")


def test_bf16_is_rejected_on_device_without_bf16() -> None:
    rows = module("precision.arch").ARCHITECTURES
    with patch.dict(rows, {"mps": replace(rows["mps"], bf16="none")}), on("mps"):
        error = error_of(lambda: run(make_model("flux"), "bf16"))
    assert "has no bf16, not even emulated" in error


@few
def test_plain_fp16_keeps_broken_result(family: str) -> None:
    patcher = make_model(family, hot=True)
    assert same(run(patcher, "fp16 (plain)"), sample(patcher, steps=STEPS))
    assert f"{STEPS} steps, {STEPS} with NaN, infinite or clipped values: " in texts[-1]


@pytest.mark.parametrize(("family", "at"), {"flux": "img_in", "wan": "blocks.1.ffn.0"}.items())
def test_layer_that_cannot_be_scaled_keeps_run_bit_equal(family: str, at: str) -> None:
    """A scripted layer: its product cannot be replaced."""
    patcher = make_model(family)
    parent, _, own = at.rpartition(".")
    layer = patcher.model.diffusion_model.get_submodule(at)
    plain = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.float16)
    plain.load_state_dict(layer.state_dict())
    scripted = torch.jit.script(plain.eval().requires_grad_(False))
    setattr(patcher.model.diffusion_model.get_submodule(parent), own, scripted)
    assert same(run(patcher), sample(patcher, steps=STEPS))
    check_said("computed as ComfyUI does, since not every layer can be protected: ")
    assert PROTECTED not in texts[-1]


@torch.jit.script
def scripted_product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(given, weight, bias)


class ByScript(torch.nn.Module):
    """A layer of ComfyUI's with a scripted product, which needs two tensors of one dtype."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as PyTorch names it
        weight, bias = import_module("comfy.ops").cast_bias_weight(self.layer, input)
        return scripted_product(input, weight, bias)


def test_layer_with_scripted_product_is_protected() -> None:
    patcher, exact = with_fp32_twin("wan", hot=True)
    attention = patcher.model.diffusion_model.blocks[1].self_attn
    attention.o = ByScript(attention.o)

    def check(time: str) -> None:
        assert PROTECTED in texts[-1] and (time == "first" or " fine." in texts[-1])

    check_learned(patcher, exact, check)
