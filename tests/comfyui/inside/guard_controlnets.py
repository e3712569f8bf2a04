"""NaN Guard (native) with overflowing ControlNets: SD 1.5's output becomes NaN, Flux clips it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from in_comfyui import counting_loads, difference, error_of, guarded, module, texts, wrapped
from native_models import CARD, CPU, LAYOUTS, SUPPORTED, make_model, random_weights, sample, with_fp32_twin

HOT = {"sd15": {"input_blocks.1.0.in_layers.2.weight": 1e5}, "flux": {"double_blocks.0.img_mlp.2.weight": 8e4}}
CLASSES = {"sd15": ("comfy.cldm.cldm", "ControlNet"), "flux": ("comfy.ldm.flux.controlnet", "ControlNetFlux")}
family = pytest.mark.parametrize("family", HOT)


def controlnet(family: str, dtype: torch.dtype = torch.float16, *, hot: bool = False) -> Any:
    """Make a ControlNet of ComfyUI's class with random weights."""
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
    """Apply a ControlNet as ComfyUI's Apply ControlNet node does."""
    image = torch.rand((1, 3, 64, 64), generator=torch.Generator().manual_seed(3))
    return of.copy().set_cond_hint(image, strength, percents).set_previous_controlnet(before)


def as_lora(of: Any) -> Any:
    """Convert it to a Control-LoRA, whose network is made at the start of a run."""
    return import_module("comfy.controlnet").ControlLora(of.control_model.state_dict())


def attribute_names(of: Any) -> set[str]:
    return {*vars(of), *vars(getattr(of, "control_model", None) or of)}


@family
def test_overflowing_controlnet_is_recomputed_in_fp32(family: str) -> None:
    model, twin = with_fp32_twin(family)
    control, exact = applied(controlnet(family, hot=True)), applied(controlnet(family, torch.float32, hot=True))
    before, right = attribute_names(control), sample(twin, control=exact)
    assert not difference(sample(model, control=control), right) <= 0.1
    for _ in range(2):
        assert difference(sample(guarded(model), control=control), right) <= 2e-2
        assert "\nControlNet: " in texts[-1] and "; 3 calls, 3 recomputed in fp32." in texts[-1]
    assert attribute_names(control) == before


def test_overflowing_control_lora_is_recomputed_in_fp32() -> None:
    model, twin = with_fp32_twin("sd15")
    control, exact = (as_lora(controlnet("sd15", hot=True)) for _ in range(2))
    right = sample(twin, control=applied(exact))
    assert not sample(model, control=applied(control)).isfinite().all()
    assert difference(sample(guarded(model), control=applied(control)), right) <= 2e-2
    assert "; 3 calls, 3 recomputed in fp32." in texts[-1]


@family
def test_healthy_controlnet_is_bit_equal_with_guard(family: str) -> None:
    model, control = make_model(family), applied(controlnet(family))
    plain = sample(model, control=control)
    assert difference(plain, sample(model)) > 1e-2
    assert torch.equal(sample(guarded(model), control=control), plain)
    assert "3 steps, all fine." in texts[-1] and "3 calls, all fine." in texts[-1]


@pytest.mark.parametrize(("hot", "precision"), [(False, "fp16"), (True, "fp16"), (True, "inherit")])
@family
def test_controlnet_is_protected_or_recomputed_like_its_model(family: str, hot: bool, precision: str) -> None:
    """An attempt consumes the ControlNet's residuals; the rerun gets them again."""
    model, twin = with_fp32_twin(family, hot=hot)
    control, exact = applied(controlnet(family, hot=hot)), applied(controlnet(family, torch.float32, hot=hot))
    right = sample(twin, control=exact)
    assert difference(sample(twin), right) > 2e-2
    assert difference(sample(guarded(model, precision=precision), control=control), right) <= 5e-3
    lines = [line for line in texts[-1].split("\n") if "; 3 steps, " in line or "; 3 calls, " in line]
    end = "all fine." if precision == "fp16" else "recomputed in fp32."
    assert len(lines) == 2 and all(line.endswith(end) for line in lines), lines


@pytest.mark.parametrize("where", ["positive", "negative"])
@family
def test_controlnet_with_late_start_is_applied(family: str, where: str) -> None:
    """In ComfyUI's SD and SDXL, an error while adding a ControlNet's residuals only drops them."""
    model, twin = with_fp32_twin(family)

    def made(of: Any, dtype: torch.dtype, *, controlled: bool = True) -> torch.Tensor:
        control = applied(controlnet(family, dtype), 1.0, (0.3 if where == "positive" else 0.0, 1.0))
        given = {"control": control} if controlled else {}
        return sample(of, steps=4, **given if where == "positive" else {"negatives": given})

    right, without = (made(twin, torch.float32, controlled=on) for on in (True, False))
    assert difference(without, right) > 5e-2 or (family == "flux" and where == "negative")  # no guidance
    assert difference(made(guarded(model, precision="fp16"), torch.float16), right) <= 1e-2
    assert "4 steps, all fine." in texts[-1]


def test_each_controlnet_of_chain_is_guarded() -> None:
    """Two ControlNets share a network, as for two pictures. One of them works only in the last steps."""
    model, twin = with_fp32_twin("sd15")

    def chain(dtype: torch.dtype) -> Any:
        hot, other = controlnet("sd15", dtype, hot=True), controlnet("sd15", dtype)
        return applied(hot, 0.4, (0.5, 1.0), applied(other, 0.3, before=applied(hot, 0.2)))

    right = sample(twin, control=chain(torch.float32))
    assert difference(sample(guarded(model), control=chain(torch.float16)), right) <= 2e-2
    lines = [line for line in texts[-1].split("\n") if line.startswith("ControlNet: ")]
    assert len(lines) == 2 and "4 calls, 4 recomputed" in lines[0] and lines[1].endswith("3 calls, all fine.")


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (lambda control: control.control_model.time_embed[0].weight.fill_(torch.nan), "'time_embed.0.weight' holds"),
        (lambda control: setattr(control.control_model, "forward", _raises), "ValueError: a fault of its own"),
    ],
)
def test_broken_controlnet_is_named_in_error(break_it: Callable[[Any], None], found: str) -> None:
    control, model = applied(controlnet("sd15")), make_model("sd15")
    break_it(control)
    before = attribute_names(control)
    assert found in error_of(lambda: sample(guarded(model), control=control))
    assert attribute_names(control) == before


def _raises(*_: Any, **__: Any) -> None:
    raise ValueError("a fault of its own")


@pytest.mark.parametrize("precision", ["inherit", "fp16"])
def test_repeated_residuals_share_memory(precision: str) -> None:
    """Flux's ControlNet gives 2 tensors for 57 blocks."""
    given = list[Any]()

    def record(executor: Any, *args: Any, **kwargs: Any) -> Any:
        given.append([residual for several in args[4].values() for residual in several])
        return executor(*args, **kwargs)

    model = wrapped(make_model("flux"), record, "apply_model")
    sample(guarded(model, precision=precision), control=applied(controlnet("flux")))
    depth = len({*given[0]})
    assert [len({*each}) for each in given] == [depth] * 3 and depth < len(given[0]) / 5
    assert {each.dtype for each in given[-1]} == {torch.float16}


def test_method_kept_by_other_pack_guards_only_in_guarded_runs() -> None:
    """ComfyUI-TiledDiffusion saves a ControlNet's first `get_control` under another name, and replaces it in each
    run."""
    (model, twin), control = with_fp32_twin("sd15"), applied(controlnet("sd15", hot=True))

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
    assert not sample(model, control=control).isfinite().all() and not module("comfyui_host.native_guards")._RUNNING


def test_infinite_residuals_given_to_model_are_named() -> None:
    behind = guarded(make_model("sd15"))
    with counting_loads() as loads:
        error = error_of(lambda: sample(behind, control=applied(controlnet("sd15"), strength=torch.inf)))
    assert "received a ControlNet's residuals with 6656 NaN or infinite values" in error
    assert sorted(loads) == ["BaseModel", "ControlNet"], "no model is loaded again"


@pytest.mark.parametrize("strength", [0.5, 2.0, 10.0])
def test_large_residuals_times_strength_are_near_fp32(strength: float) -> None:
    model, twin = with_fp32_twin("sd15")

    def large_residuals(dtype: torch.dtype) -> Any:
        made = controlnet("sd15", dtype, hot=True)
        made.control_model.middle_block_out[0].weight.mul_(4e3)
        return applied(made, strength)

    right = sample(twin, control=large_residuals(torch.float32))
    assert difference(sample(guarded(model), control=large_residuals(torch.float16)), right) <= 2e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_fp16_model_accepts_controlnet_of_other_dtype(dtype: torch.dtype) -> None:
    model, control = make_model("sd15"), applied(controlnet("sd15", dtype))
    plain = sample(model, control=control)
    assert torch.equal(sample(guarded(model, precision="fp16 (plain)"), control=control), plain)


class NoNetwork(import_module("comfy.controlnet").ControlNet):
    """A ControlNet of another pack that has no network, or one that is not a module."""

    def __init__(self, network: Any = None) -> None:
        super().__init__()
        self.control_model = network

    def get_control(self, x: torch.Tensor, *_: Any) -> dict[str, list[torch.Tensor]]:
        return {"middle": [torch.full((x.shape[0], 64, 4, 4), 0.1, dtype=torch.float16)]}

    def get_models(self) -> list[Any]:
        return []


@pytest.mark.parametrize("inserted", [False, True])
@pytest.mark.parametrize("network", [None, print])
def test_controlnet_without_network_is_bit_equal_with_guard(network: Any, inserted: bool) -> None:
    model = make_model("sd15")
    plain = sample(model, control=NoNetwork(network))
    assert torch.equal(sample(guarded(model, inserted=inserted), control=NoNetwork(network)), plain)


def test_controlnet_guard_failure_is_logged_and_run_is_unchanged(monkeypatch: Any, caplog: Any) -> None:
    model, control = make_model("sd15"), applied(controlnet("sd15"))
    plain = sample(model, control=control)
    monkeypatch.setattr(module("comfyui_host.native_guards")._NetworkGuard, "_attempt", lambda *_, **__: 1 / 0)
    assert torch.equal(sample(guarded(model, inserted=True), control=control), plain)
    assert "ControlNet: Not guarded from call 1 on: ZeroDivisionError" in caplog.text


def test_control_lora_network_is_freed_after_run() -> None:
    control, seen = applied(as_lora(controlnet("sd15", hot=True))), list[Any]()
    get_control = control.get_control
    control.get_control = lambda *args: (seen.append(weakref.ref(control.control_model)), get_control(*args))[1]
    gc.disable()
    try:
        sample(guarded(make_model("sd15")), control=control)
        assert seen and not any(network() is not None for network in seen)
    finally:
        gc.enable()
