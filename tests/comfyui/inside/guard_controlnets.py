"""NaN Guard (native) where a ControlNet overflows: SD 1.5's becomes NaN, Flux's clips it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import difference, error_of, guarded, said
from native_models import CARD, CPU, LAYOUTS, SUPPORTED, in_fp32, make_model, random_weights, sample

HOT = {"sd15": {"input_blocks.1.0.in_layers.2.weight": 1e5}, "flux": {"double_blocks.0.img_mlp.2.weight": 8e4}}
CLASSES = {"sd15": ("comfy.cldm.cldm", "ControlNet"), "flux": ("comfy.ldm.flux.controlnet", "ControlNetFlux")}
family = pytest.mark.parametrize("family", HOT)


def controlnet(family: str, dtype: torch.dtype = torch.float16, *, hot: bool = False) -> Any:
    """Of ComfyUI's class, with random weights."""
    layout = LAYOUTS[family]
    sizes = getattr(SUPPORTED, layout.config)(layout.settings()).unet_config
    module, name = CLASSES[family]
    if family == "sd15":
        sizes = {key: value for key, value in sizes.items() if key != "out_channels"} | {"hint_channels": 3}
    operations = import_module("comfy.ops").disable_weight_init
    network = getattr(import_module(module), name)(**sizes, dtype=dtype, device=CPU, operations=operations)
    network.eval().requires_grad_(False).load_state_dict(random_weights(network, HOT[family] if hot else {}))
    made = import_module("comfy.controlnet").ControlNet(network, load_device=CARD, manual_cast_dtype=None)
    return made.copy()


def applied(of: Any, strength: float = 0.5, percents: tuple[float, float] = (0.0, 1.0), before: Any = None) -> Any:
    """As ComfyUI's node Apply ControlNet does."""
    image = torch.rand((1, 3, 64, 64), generator=torch.Generator().manual_seed(3))
    return of.copy().set_cond_hint(image, strength, percents).set_previous_controlnet(before)


def as_lora(of: Any) -> Any:
    """The same as a Control-LoRA, whose network is made when a run begins."""
    return import_module("comfy.controlnet").ControlLora(of.control_model.state_dict())


def attributes(of: Any) -> set[str]:
    return {*vars(of), *vars(getattr(of, "control_model", None) or of)}


@family
def test_what_a_controlnet_gives_is_recomputed_in_fp32(family: str) -> None:
    layout, model = LAYOUTS[family], make_model(LAYOUTS[family])
    control, exact = applied(controlnet(family, hot=True)), applied(controlnet(family, torch.float32, hot=True))
    before, right = attributes(control), sample(in_fp32(model, layout), layout, control=exact)
    assert not difference(sample(model, layout, control=control), right) <= 0.1
    for _ in range(2):
        assert difference(sample(guarded(model), layout, control=control), right) <= 2e-2
        assert "\nControlNet: " in said[-1] and "; 3 calls, 3 recomputed in fp32." in said[-1]
    assert attributes(control) == before


def test_a_control_lora_is_guarded() -> None:
    layout, model = LAYOUTS["sd15"], make_model(LAYOUTS["sd15"])
    control, exact = (as_lora(controlnet("sd15", hot=True)) for _ in range(2))
    right = sample(in_fp32(model, layout), layout, control=applied(exact))
    assert not sample(model, layout, control=applied(control)).isfinite().all()
    assert difference(sample(guarded(model), layout, control=applied(control)), right) <= 2e-2
    assert "; 3 calls, 3 recomputed in fp32." in said[-1]


@family
def test_a_healthy_controlnet_stays_as_it_is(family: str) -> None:
    layout, model = LAYOUTS[family], make_model(LAYOUTS[family])
    control = applied(controlnet(family))
    plain = sample(model, layout, control=control)
    assert difference(plain, sample(model, layout)) > 1e-2
    assert torch.equal(sample(guarded(model), layout, control=control), plain)
    assert "3 steps, all fine." in said[-1] and "3 calls, all fine." in said[-1]


@pytest.mark.parametrize("hot", [False, True])
@family
def test_a_controlnet_has_overflow_protection_where_the_model_has(family: str, hot: bool) -> None:
    layout, model = LAYOUTS[family], make_model(LAYOUTS[family], hot=hot)
    control, exact = applied(controlnet(family, hot=hot)), applied(controlnet(family, torch.float32, hot=hot))
    right = sample(in_fp32(model, layout), layout, control=exact)
    assert difference(sample(guarded(model, precision="fp16"), layout, control=control), right) <= 5e-3
    assert "3 steps, all fine." in said[-1] and "3 calls, all fine." in said[-1]


@pytest.mark.parametrize("where", ["positive", "negative"])
@family
def test_a_controlnet_that_begins_late_is_applied(family: str, where: str) -> None:
    """ComfyUI's SD and SDXL go on without what a ControlNet gives, where adding it raises."""
    layout, model = LAYOUTS[family], make_model(LAYOUTS[family])

    def made(of: Any, dtype: torch.dtype, *, controlled: bool = True) -> torch.Tensor:
        control = applied(controlnet(family, dtype), 1.0, (0.3 if where == "positive" else 0.0, 1.0))
        given = {"control": control} if controlled else {}
        return sample(of, layout, steps=4, **given if where == "positive" else {"negatives": given})

    right, without = (made(in_fp32(model, layout), torch.float32, controlled=on) for on in (True, False))
    assert difference(without, right) > 5e-2 or (family == "flux" and where == "negative")  # which has no guidance
    assert difference(made(guarded(model, precision="fp16"), torch.float16), right) <= 1e-2
    assert "4 steps, all fine." in said[-1]


def test_each_of_a_chain_is_guarded() -> None:
    """Two have the same network, as where one is applied to two pictures; one works in the last steps alone."""
    layout, model = LAYOUTS["sd15"], make_model(LAYOUTS["sd15"])

    def chain(dtype: torch.dtype) -> Any:
        hot, other = controlnet("sd15", dtype, hot=True), controlnet("sd15", dtype)
        return applied(hot, 0.4, (0.5, 1.0), applied(other, 0.3, before=applied(hot, 0.2)))

    right = sample(in_fp32(model, layout), layout, control=chain(torch.float32))
    assert difference(sample(guarded(model), layout, control=chain(torch.float16)), right) <= 2e-2
    lines = [line for line in said[-1].split("\n") if line.startswith("ControlNet: ")]
    assert len(lines) == 2 and "4 calls, 4 recomputed" in lines[0] and lines[1].endswith("3 calls, all fine.")


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (lambda control: control.control_model.time_embed[0].weight.fill_(torch.nan), "'time_embed.0.weight' holds"),
        (lambda control: setattr(control.control_model, "forward", _raises), "ValueError: a fault of its own"),
    ],
)
def test_a_broken_controlnet_ends_the_run_by_name(break_it: Callable[[Any], None], found: str) -> None:
    control, model = applied(controlnet("sd15")), make_model(LAYOUTS["sd15"])
    break_it(control)
    before = attributes(control)
    assert found in error_of(lambda: sample(guarded(model), LAYOUTS["sd15"], control=control))
    assert attributes(control) == before


def _raises(*_: Any, **__: Any) -> None:
    raise ValueError("a fault of its own")


def test_a_guard_set_to_stop_stops_at_a_controlnet() -> None:
    control = applied(controlnet("sd15", hot=True))
    model = guarded(make_model(LAYOUTS["sd15"]), on_failure="stop")
    assert error_of(lambda: sample(model, LAYOUTS["sd15"], control=control)).startswith("GuardStopped")


@pytest.mark.parametrize("precision", ["inherit", "fp16"])
def test_what_a_controlnet_gives_several_times_takes_its_memory_once(precision: str) -> None:
    """Flux's gives 2 tensors for 57 blocks."""
    layout, given = LAYOUTS["flux"], list[Any]()

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        given.append([residual for several in args[4].values() for residual in several])
        return executor(*args, **kwargs)

    model, kind = make_model(layout), import_module("comfy.patcher_extension").WrappersMP.APPLY_MODEL
    model.add_wrapper_with_key(kind, "test", look)
    sample(guarded(model, precision=precision), layout, control=applied(controlnet("flux")))
    depth = len({*given[0]})
    assert [len({*each}) for each in given] == [depth] * 3 and depth < len(given[0]) / 5
    assert {each.dtype for each in given[-1]} == {torch.float16}
