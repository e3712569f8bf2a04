"""NaN Guard (native) where a ControlNet overflows: SD 1.5's becomes NaN, Flux's clips it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import counting_loads, difference, error_of, guarded, module, said, wrapped
from native_models import CARD, CPU, LAYOUTS, SUPPORTED, make_model, random_weights, sample, with_its_twin

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
    model, twin = with_its_twin(family)
    control, exact = applied(controlnet(family, hot=True)), applied(controlnet(family, torch.float32, hot=True))
    before, right = attributes(control), sample(twin, control=exact)
    assert not difference(sample(model, control=control), right) <= 0.1
    for _ in range(2):
        assert difference(sample(guarded(model), control=control), right) <= 2e-2
        assert "\nControlNet: " in said[-1] and "; 3 calls, 3 recomputed in fp32." in said[-1]
    assert attributes(control) == before


def test_a_control_lora_is_guarded() -> None:
    model, twin = with_its_twin("sd15")
    control, exact = (as_lora(controlnet("sd15", hot=True)) for _ in range(2))
    right = sample(twin, control=applied(exact))
    assert not sample(model, control=applied(control)).isfinite().all()
    assert difference(sample(guarded(model), control=applied(control)), right) <= 2e-2
    assert "; 3 calls, 3 recomputed in fp32." in said[-1]


@family
def test_a_healthy_controlnet_stays_as_it_is(family: str) -> None:
    model, control = make_model(family), applied(controlnet(family))
    plain = sample(model, control=control)
    assert difference(plain, sample(model)) > 1e-2
    assert torch.equal(sample(guarded(model), control=control), plain)
    assert "3 steps, all fine." in said[-1] and "3 calls, all fine." in said[-1]


@pytest.mark.parametrize(("hot", "precision"), [(False, "fp16"), (True, "fp16"), (True, "inherit")])
@family
def test_a_controlnet_has_overflow_protection_and_reruns_where_the_model_has(
    family: str, hot: bool, precision: str
) -> None:
    """What it gives is used up by an attempt, and is there for the rerun."""
    model, twin = with_its_twin(family, hot=hot)
    control, exact = applied(controlnet(family, hot=hot)), applied(controlnet(family, torch.float32, hot=hot))
    right = sample(twin, control=exact)
    assert difference(sample(twin), right) > 2e-2
    assert difference(sample(guarded(model, precision=precision), control=control), right) <= 5e-3
    told = [line for line in said[-1].split("\n") if "; 3 steps, " in line or "; 3 calls, " in line]
    end = "all fine." if precision == "fp16" else "recomputed in fp32."
    assert len(told) == 2 and all(line.endswith(end) for line in told), told


@pytest.mark.parametrize("where", ["positive", "negative"])
@family
def test_a_controlnet_that_begins_late_is_applied(family: str, where: str) -> None:
    """ComfyUI's SD and SDXL go on without what a ControlNet gives, where adding it raises."""
    model, twin = with_its_twin(family)

    def made(of: Any, dtype: torch.dtype, *, controlled: bool = True) -> torch.Tensor:
        control = applied(controlnet(family, dtype), 1.0, (0.3 if where == "positive" else 0.0, 1.0))
        given = {"control": control} if controlled else {}
        return sample(of, steps=4, **given if where == "positive" else {"negatives": given})

    right, without = (made(twin, torch.float32, controlled=on) for on in (True, False))
    assert difference(without, right) > 5e-2 or (family == "flux" and where == "negative")  # which has no guidance
    assert difference(made(guarded(model, precision="fp16"), torch.float16), right) <= 1e-2
    assert "4 steps, all fine." in said[-1]


def test_each_of_a_chain_is_guarded() -> None:
    """Two have the same network, as where one is applied to two pictures; one works in the last steps alone."""
    model, twin = with_its_twin("sd15")

    def chain(dtype: torch.dtype) -> Any:
        hot, other = controlnet("sd15", dtype, hot=True), controlnet("sd15", dtype)
        return applied(hot, 0.4, (0.5, 1.0), applied(other, 0.3, before=applied(hot, 0.2)))

    right = sample(twin, control=chain(torch.float32))
    assert difference(sample(guarded(model), control=chain(torch.float16)), right) <= 2e-2
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
    control, model = applied(controlnet("sd15")), make_model("sd15")
    break_it(control)
    before = attributes(control)
    assert found in error_of(lambda: sample(guarded(model), control=control))
    assert attributes(control) == before


def _raises(*_: Any, **__: Any) -> None:
    raise ValueError("a fault of its own")


def test_a_guard_set_to_stop_stops_at_a_controlnet() -> None:
    control = applied(controlnet("sd15", hot=True))
    model = guarded(make_model("sd15"), on_failure="stop")
    assert error_of(lambda: sample(model, control=control)).startswith("GuardStopped")
    assert said[-1].startswith("ControlNet: ") and "ended by the NaN Guard at call 1" in said[-1]


@pytest.mark.parametrize("precision", ["inherit", "fp16"])
def test_what_a_controlnet_gives_several_times_takes_its_memory_once(precision: str) -> None:
    """Flux's gives 2 tensors for 57 blocks."""
    given = list[Any]()

    def look(executor: Any, *args: Any, **kwargs: Any) -> Any:
        given.append([residual for several in args[4].values() for residual in several])
        return executor(*args, **kwargs)

    model = wrapped(make_model("flux"), look, "apply_model")
    sample(guarded(model, precision=precision), control=applied(controlnet("flux")))
    depth = len({*given[0]})
    assert [len({*each}) for each in given] == [depth] * 3 and depth < len(given[0]) / 5
    assert {each.dtype for each in given[-1]} == {torch.float16}


def test_a_method_that_another_pack_has_kept_guards_in_guarded_runs_alone() -> None:
    """ComfyUI-TiledDiffusion keeps a ControlNet's first `get_control` under another name, and puts its own in its place
    in each run."""
    (model, twin), control = with_its_twin("sd15"), applied(controlnet("sd15", hot=True))

    def keep(executor: Any, *args: Any, **kwargs: Any) -> Any:
        control.__dict__.setdefault("kept", control.get_control)
        control.get_control = lambda *args: control.kept(*args)
        return executor(*args, **kwargs)

    keeping = wrapped(model, keep, "calc_cond_batch")
    stopped = error_of(lambda: sample(guarded(keeping, on_failure="stop"), control=control))
    assert stopped.startswith("GuardStopped") and control.get_control.__name__ == "<lambda>"
    assert not sample(model, control=control).isfinite().all()
    right = sample(twin, control=applied(controlnet("sd15", torch.float32, hot=True)))
    for _ in range(2):
        assert difference(sample(guarded(keeping), control=control), right) <= 2e-2
    assert not sample(model, control=control).isfinite().all() and not module("comfyui_host.guards")._RUNNING


def test_residuals_that_are_infinite_before_a_model_runs_are_named() -> None:
    behind = guarded(make_model("sd15"))
    with counting_loads() as loads:
        error = error_of(lambda: sample(behind, control=applied(controlnet("sd15"), strength=torch.inf)))
    assert "was given a ControlNet's residuals with 6656 NaN or infinite values" in error
    assert sorted(loads) == ["BaseModel", "ControlNet"], "nothing is loaded again"


@pytest.mark.parametrize("strength", [0.5, 2.0, 10.0])
def test_loud_residuals_times_a_strength_stay_finite(strength: float) -> None:
    model, twin = with_its_twin("sd15")

    def loud(dtype: torch.dtype) -> Any:
        made = controlnet("sd15", dtype, hot=True)
        made.control_model.middle_block_out[0].weight.mul_(4e3)
        return applied(made, strength)

    right = sample(twin, control=loud(torch.float32))
    assert difference(sample(guarded(model), control=loud(torch.float16)), right) <= 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_fp16_of_a_model_takes_any_controlnet(dtype: torch.dtype) -> None:
    model, control = make_model("sd15"), applied(controlnet("sd15", dtype))
    plain = sample(model, control=control)
    assert torch.equal(sample(guarded(model, precision="fp16 (plain)"), control=control), plain)


class NoNetwork(import_module("comfy.controlnet").ControlNet):
    """As another pack's may be: it computes without a network, or one that is no module."""

    def __init__(self, network: Any = None) -> None:
        super().__init__()
        self.control_model = network

    def get_control(self, x: torch.Tensor, *_: Any) -> dict[str, list[torch.Tensor]]:
        return {"middle": [torch.full((x.shape[0], 64, 4, 4), 0.1, dtype=torch.float16)]}

    def get_models(self) -> list[Any]:
        return []


@pytest.mark.parametrize("inserted", [False, True])
@pytest.mark.parametrize("network", [None, print])
def test_a_controlnet_without_a_network_goes_on(network: Any, inserted: bool) -> None:
    model = make_model("sd15")
    plain = sample(model, control=NoNetwork(network))
    assert torch.equal(sample(guarded(model, inserted=inserted), control=NoNetwork(network)), plain)


def test_what_a_controlnets_guard_gives_up_is_in_the_report(monkeypatch: Any, caplog: Any) -> None:
    model, control = make_model("sd15"), applied(controlnet("sd15"))
    plain = sample(model, control=control)
    monkeypatch.setattr(module("comfyui_host.guards")._NetworkGuard, "_attempt", lambda *_, **__: 1 / 0)
    assert torch.equal(sample(guarded(model, inserted=True), control=control), plain)
    assert "ControlNet: Not guarded from call 1 on: ZeroDivisionError" in caplog.text


def test_a_control_loras_network_is_gone_after_the_run() -> None:
    control, seen = applied(as_lora(controlnet("sd15", hot=True))), list[Any]()
    get_control = control.get_control
    control.get_control = lambda *args: (seen.append(weakref.ref(control.control_model)), get_control(*args))[1]
    gc.disable()
    try:
        sample(guarded(make_model("sd15")), control=control)
        assert seen and not any(network() is not None for network in seen)
    finally:
        gc.enable()
