"""NaN Guard (native) with a precision of its own, and every layer scaled, on every family of ComfyUI's own."""

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
from guard_beside import lora_on, lowvram
from in_comfyui import error_of, guarded, module, on, said, same
from native_models import LAYOUTS, Layout, distance, make_model, sample, with_its_twin
from native_table import Cells, figures, table

torch.set_num_threads(1)  # so small that threads cost more than they gain
WEIGHTS = {  # dtype, and what they are cast to; the second as ComfyUI has models that it refuses fp16 for
    "fp16": (torch.float16, None),
    "bf16 in fp32": (torch.bfloat16, torch.float32),
}
BF16 = {"bf16": (torch.bfloat16, None)}
HEALTHY = "healthy"
HEATS = (HEALTHY, "hot in the stream", "hot inside")
FEW = ("sd15", "flux", "qwen_image", "wan")
STEPS = 4  # the first shows what the others are computed by
HOTTEST = 6e4  # |w| of a hot layer: of fp16's 65504
MODULATES = re.compile("mod|norm|emb|ada")  # in the names of layers: they neither write to the stream nor enlarge it
SQUARE = dict.fromkeys(("Lumina2", "ZImage"), "feed_forward.w2.weight")  # their writers, as wide as what they read
AS_PLAIN = {"kandinsky5": 1.2}  # times plain fp16's: all that later steps run plain, where the first showed room
AS_PREPARED = {("sensenova", "bf16 in fp32"): 1.2}  # times ComfyUI's own, which prepares a prompt's keys in bf16
PROTECTED = "overflow protection; "
LARGE = 256  # values: more than a gate has here
# once or twice a step, or in a few families; they are no part of a block's way, or a product that is written out
WIDENED = {"mul", "to", "tanh", "sigmoid", "einsum", "bmm", "baddbmm", "matmul", "index_select", "clip", "embedding"}
WIDENED |= {"add", "where"}
HEAD = """\
How far from fp32 the plain run is / the guard's with precision fp16, overflow protection / the guard's
with precision bf16. Distances are norms, as shares of the norm. Weights in bf16 are computed in fp32 by the plain
run."""
cells = table("scaled", HEAD, [f"{weights}, {heat}" for weights in WEIGHTS for heat in HEATS])
few = pytest.mark.parametrize("family", FEW)


def hot(layout: Layout, heat: str) -> Layout:
    """With a layer of its block that overflows in the named way: what writes to the stream makes few of many, and what
    stays inside makes many of few."""
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
    """Sampled behind a guard. What it says in the end is said[-1]."""
    return sample(guarded(patcher, precision=precision, **policy), steps=STEPS)


def check_said(*parts: str) -> None:
    """Of a run without reruns."""
    assert " fine." in said[-1] and all(part in said[-1] for part in parts), said[-1]


def held(patcher: Any) -> list[torch.Tensor]:
    return [weight.clone() for weight in patcher.model.state_dict().values()]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("heat", HEATS)
@pytest.mark.parametrize("family", LAYOUTS)
def test_scaled_layers_are_right_without_a_rerun(cells: Cells, family: str, heat: str, weights: str) -> None:
    """Without guidance, which takes out what both halves round alike: more of it, the coarser they round."""
    layout = replace(LAYOUTS[family] if heat == HEALTHY else hot(LAYOUTS[family], heat), cfg=1.0)
    patcher, exact = with_its_twin(layout, *WEIGHTS[weights], hot=heat != HEALTHY)
    stored = held(patcher)
    plain, reference = (sample(model, steps=STEPS) for model in (patcher, exact))
    off = partial(distance, layout, exact=reference)
    protected = off(run(patcher))
    check_said("fp16, as you chose", PROTECTED)
    in_bf16 = off(run(patcher, "bf16"))
    assert 0 < protected <= max(in_bf16 / 4, AS_PREPARED.get((family, weights), 0.0) * off(plain))
    assert same(plain, sample(patcher, steps=STEPS)) and all(map(same, stored, held(patcher)))
    if weights == "fp16" and heat == HEALTHY:
        assert protected <= AS_PLAIN.get(family, 1.0) * off(plain)
    elif weights == "fp16":
        assert math.isnan(off(plain)) or off(plain) > 5e-3
    cells[family, f"{weights}, {heat}"] = figures(off(plain), protected, in_bf16, between=" / ")


@pytest.mark.parametrize("family", LAYOUTS)
def test_later_steps_widen_what_few_functions_are_given(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be read and written twice as wide, and ComfyUI's kernels take half precision alone."""
    mode, widened = module("precision.upcast").Fp32Mode, set[str]()
    compute = mode.compute

    def told(self: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [each for each in args if isinstance(each, torch.Tensor) and each.dtype is torch.float16]
        if type(self).__name__ == "PlannedMode" and any(each.numel() >= LARGE for each in tensors):
            widened.add(func.__name__)
        return compute(self, func, args, kwargs)

    monkeypatch.setattr(mode, "compute", told)
    run(make_model(replace(LAYOUTS[family], cfg=1.0)))
    check_said(PROTECTED)
    assert widened - {"__get__"} <= WIDENED


def check_learned(patcher: Any, exact: Any, check: Callable[[str], None]) -> None:
    """Two runs of one guard, whose model fails in fp16; and one of another guard, later.

    check: of each run, what is said.
    """
    reference = sample(exact, steps=STEPS)
    learner = guarded(patcher, scope="learned")
    for time in ("first", "second", "after a restart"):
        learner = guarded(patcher, scope="learned") if time == "after a restart" else learner
        said.clear()
        assert distance(patcher.model.layout, sample(learner, steps=STEPS), reference) <= 5e-3
        check(time)


@pytest.mark.parametrize("family", LAYOUTS)
def test_scope_learned_reruns_once_and_is_scaled_from_then_on(family: str) -> None:
    def check(time: str) -> None:
        *told, report = said
        if time == "first":
            assert len(told) == 1 and told[0].startswith("call 1: NaN or infinite in fp16")
            assert PROTECTED in report and f"{STEPS} steps, 1 recomputed in fp32." in report
        else:
            assert not told
            check_said(PROTECTED)
            assert ("from a profile: " in report) == (time == "after a restart")

    check_learned(*with_its_twin(family, hot=True), check)


def test_what_was_learned_is_known_to_later_guards_of_the_same_model_and_not_of_its_kin() -> None:
    overflows, healthy = make_model("sd15", hot=True), make_model("sd15")
    plain = sample(healthy, steps=STEPS)

    def learning(patcher: Any, around: Any = nullcontext) -> torch.Tensor:
        with around():
            return run(patcher, "inherit", scope="learned")

    learning(overflows)
    assert f"{STEPS} steps, 1 recomputed in fp32." in said[-1] and "profile" not in said[-1]
    assert same(plain, learning(healthy)) and "profile" not in said[-1]
    learning(lora_on(overflows))
    assert f"{STEPS} steps, 1 recomputed in fp32." in said[-1] and "profile" not in said[-1]
    anew, another, again = (make_model("sd15", hot=True) for _ in range(3))
    known = [(lora_on(anew), nullcontext), (lora_on(another), lowvram), (again, lowvram), (overflows, nullcontext)]
    for patcher, around in known:
        learning(patcher, around)
        check_said(PROTECTED, "from a profile: ")


@pytest.mark.parametrize("weights", WEIGHTS | BF16)
@few
def test_each_precision_is_what_it_says(family: str, weights: str) -> None:
    layout = LAYOUTS[family]
    patcher, exact = with_its_twin(layout, *(WEIGHTS | BF16)[weights])
    plain, reference = (sample(model, steps=STEPS) for model in (patcher, exact))
    with on("sm75"):
        assert 0 < distance(layout, run(patcher, "auto"), reference) <= 5e-3
    check_said("has no native bf16", PROTECTED)
    assert ("ComfyUI alone would compute it in fp32" in said[-1]) == (weights == "bf16 in fp32")
    for card in ("sm80", "sm90", "cpu"):
        with on(card):
            assert same(run(patcher, "auto"), plain)
        check_said(", which ComfyUI chose for ")
        assert PROTECTED not in said[-1]
    as_it_is = {"fp16": "fp16 (plain)", "bf16": "bf16", "bf16 in fp32": "fp32"}[weights]
    with on("cpu"):
        for precision in ("inherit", "bf16", "fp16 (plain)", "fp32"):
            if precision == "fp16 (plain)" != as_it_is:
                error = error_of(lambda: run(patcher, "fp16 (plain)"))
                assert error.startswith("BadInput: ComfyUI computes") and "--fp16-unet" in error
                continue
            made = run(patcher, precision)
            check_said()
            assert same(made, plain) == (precision in ("inherit", as_it_is))
            off = distance(layout, made, reference)
            assert precision != "fp32" or off <= 1e-5
            assert precision != "bf16" or 1e-3 <= off <= 3e-2


@pytest.mark.parametrize("option", ["fp32_unet", "force_fp32"])
def test_auto_is_fp32_where_comfyui_was_told_to(option: str) -> None:
    patcher = make_model("flux", *WEIGHTS["bf16 in fp32"])
    with on("sm75"), patch.object(import_module("comfy.cli_args").args, option, True, create=True):
        made = run(patcher, "auto")
    assert same(made, sample(patcher, steps=STEPS))
    check_said("fp32 for ")


def test_bf16_is_refused_on_a_device_that_has_none() -> None:
    rows = module("precision.arch").ARCHITECTURES
    with patch.dict(rows, {"mps": replace(rows["mps"], bf16="none")}), on("mps"):
        error = error_of(lambda: run(make_model("flux"), "bf16"))
    assert "has no bf16, not even emulated" in error


@few
def test_plain_fp16_is_left_as_broken_as_it_is(family: str) -> None:
    patcher = make_model(family, hot=True)
    assert same(run(patcher, "fp16 (plain)"), sample(patcher, steps=STEPS))
    assert f"{STEPS} steps, {STEPS} with NaN, infinite or clipped values: " in said[-1]


@pytest.mark.parametrize(("family", "at"), {"flux": "img_in", "wan": "blocks.1.ffn.0"}.items())
def test_what_cannot_be_scaled_is_as_comfyui_computes_it(family: str, at: str) -> None:
    """A layer that PyTorch has compiled: nobody can have it multiply otherwise."""
    patcher = make_model(family)
    parent, _, own = at.rpartition(".")
    layer = patcher.model.diffusion_model.get_submodule(at)
    plain = torch.nn.Linear(layer.in_features, layer.out_features, dtype=torch.float16)
    plain.load_state_dict(layer.state_dict())
    scripted = torch.jit.script(plain.eval().requires_grad_(False))
    setattr(patcher.model.diffusion_model.get_submodule(parent), own, scripted)
    assert same(run(patcher), sample(patcher, steps=STEPS))
    check_said("as ComfyUI computes it, since not every layer can be protected: ")
    assert PROTECTED not in said[-1]


@torch.jit.script
def scripted_product(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(given, weight, bias)


class ByScript(torch.nn.Module):
    """A layer of ComfyUI's whose product takes two tensors of one dtype: a rerun has them in float32, scaled layers
    have not."""

    def __init__(self, layer: torch.nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as PyTorch names it
        weight, bias = import_module("comfy.ops").cast_bias_weight(self.layer, input)
        return scripted_product(input, weight, bias)


def test_what_cannot_be_scaled_is_not_learned() -> None:
    patcher, exact = with_its_twin("wan", hot=True)
    attention = patcher.model.diffusion_model.blocks[1].self_attn
    attention.o = ByScript(attention.o)

    def check(time: str) -> None:
        assert time == "after a restart" or "since not every layer can be protected: " in said[-1]

    check_learned(patcher, exact, check)
