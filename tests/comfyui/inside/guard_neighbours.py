"""NaN Guard (native) beside other packs' wrappers, LoRAs, torch.compile and each attention."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from guard_beside import compiled_by_comfyui, lora_on
from in_comfyui import difference, error_of, guarded, module, on, said, witness, wrapped
from native_models import LAYOUTS, in_fp32, make_model, sample, with_its_twin

ATTENTION = import_module("comfy.ldm.modules.attention")
calls = module("comfyui_host.calls")
guards = module("comfyui_host.guards")
HALF, SINGLE = torch.float16, torch.float32
ATTENTIONS = {"sd15": 14, "flux": 4}  # of a step


def test_other_packs_wrappers_are_called_in_the_rerun_too() -> None:
    """Put on before the guard and after it."""
    hot, twin = with_its_twin("sd15", hot=True)
    exact, without = sample(_wrapped(twin, [])), sample(twin)
    assert difference(without, exact) > 2e-2  # they have an effect
    for order in ("before", "after"):
        called: list[str] = []
        patcher = guarded(_wrapped(hot, called)) if order == "before" else _wrapped(guarded(hot), called)
        assert difference(sample(patcher), exact) <= 1e-3
        assert sorted(set(called)) == ["apply_model", "diffusion_model", "unet function"]


def _wrapped(patcher: Any, called: list[str]) -> Any:
    def unet_function(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        called.append("unet function")
        return apply_model(call["input"], call["timestep"], **call["c"]) * 0.9

    def chained(kind: str) -> Callable[..., Any]:
        def wrapper(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            called.append(kind)
            return executor(x * 1.1, *args, **kwargs)

        return wrapper

    for kind in ("apply_model", "diffusion_model"):
        patcher = wrapped(patcher, chained(kind), kind)
    patcher.set_model_unet_function_wrapper(unet_function)
    return patcher


def test_a_lora_on_the_guarded_model_is_in_the_rerun() -> None:
    """One that is put on before the guard is guard_beside.py's."""
    hot, twin = with_its_twin("sd15", hot=True)
    without, made = sample(twin), sample(patcher := lora_on(guarded(hot)))
    exact = sample(in_fp32(patcher))  # it is in the weights by now
    assert difference(made, exact) <= 1e-5
    assert difference(without, exact) > 2e-2
    assert torch.isnan(sample(hot)).all()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("family", "hot", "part"),
    [("sd15", True, "diffusion_model.out"), ("flux", False, "diffusion_model"), ("flux", True, "diffusion_model")],
)
def test_a_compiled_model_is_guarded(family: str, hot: bool, part: str, order: str) -> None:
    model, twin = with_its_twin(family, hot=hot)
    expected = sample(twin if hot else model)
    torch.compiler.reset()
    before = order == "before"
    patcher = guarded(compiled_by_comfyui(model, part)) if before else compiled_by_comfyui(guarded(model), part)
    assert torch.equal(sample(patcher), expected)


@pytest.mark.parametrize(
    ("name", "dtypes"),
    {
        **{key: set() for key in ("basic", "sub_quad", "split", "pytorch")},
        "xformers": {HALF, SINGLE},
        "sage": {HALF},
        "flash": {HALF},
    }.items(),
)
def test_every_attention_is_right_in_the_rerun(name: str, dtypes: set[torch.dtype]) -> None:
    """Those for CUDA have stand-ins for their kernels. dtypes: that these are given."""
    hot, twin = with_its_twin("sd15", hot=True)
    with _chosen(name) as seen:
        made = sample(guarded(hot))
    assert difference(made, sample(twin)) <= 1e-5
    assert set(seen) == dtypes


@pytest.mark.parametrize("name", ["basic", "sub_quad", "split", "xformers", "sage", "flash"])
@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_every_attention_is_pytorchs_with_every_layer_scaled(family: str, name: str) -> None:
    """Which multiplies in half precision, where these would in float32, or refuse what has several dtypes."""
    hot, twin = with_its_twin(family, hot=True)
    of_pytorch, calls = ATTENTION.attention_pytorch, list[int]()

    @wraps(of_pytorch)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return of_pytorch(*args, **kwargs)

    with patch.object(ATTENTION, "attention_pytorch", counted), _chosen(name) as seen:
        made = sample(guarded(hot, precision="fp16"))
    assert seen == [] and len(calls) == 3 * ATTENTIONS[family]
    assert difference(made, sample(twin)) <= 5e-3


@contextmanager
def _chosen(name: str) -> Iterator[list[torch.dtype]]:
    """Yields the dtypes that the stand-in for a kernel was given."""
    seen: list[torch.dtype] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append(q.dtype)
        if name in ("sage", "flash"):
            assert q.dtype in (torch.float16, torch.bfloat16), "for half precision only"
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    stand_ins = {
        "sageattn": kernel,
        "flash_attn_wrapper": kernel,
        "xformers": SimpleNamespace(ops=SimpleNamespace(memory_efficient_attention=kernel)),
        "BROKEN_XFORMERS": False,
        "optimized_attention": getattr(ATTENTION, f"attention_{name}"),
    }
    with patch.multiple(ATTENTION, create=True, **stand_ins):
        yield seen


def _as_it_is(_chosen: Any, q: Any, k: Any, v: Any, heads: int, *_: Any, **more: Any) -> torch.Tensor:
    return ATTENTION.attention_pytorch(q, k, v, heads, **more)


def _around(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return 1.5 * chosen(*args, **kwargs) + 0.3


def _in_its_own_way(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _as_it_is(chosen, 3 * q, *args, **kwargs)


def _of_some(chosen: Any, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of prompts alone."""
    return (_in_its_own_way if q.shape != k.shape else _as_it_is)(chosen, q, k, *args, **kwargs)


def _of_later_blocks(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In its own way, and of the output blocks alone."""
    block = kwargs["transformer_options"].get("block", ("",))[0]
    return (_in_its_own_way if block == "output" else _as_it_is)(chosen, q, *args, **kwargs)


class Refused(Exception):
    """As a compiler of kernels raises, which is no RuntimeError."""


def _in_half_alone(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if q.dtype is SINGLE:
        raise Refused
    return _as_it_is(chosen, q.nan_to_num(), *args, **kwargs)


def _by_a_kernel_later(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """From the second step on, it asks where its query lies."""
    if kwargs["transformer_options"]["sigmas"].max() < 14:
        q.data_ptr()
    return _in_its_own_way(chosen, q, *args, **kwargs)


def _of_a_folder(_chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _around(_chosen, *args, **kwargs)


_of_a_folder.__module__ = "/home/sage/flash message/custom_nodes/a_pack_x_2.usage"


def overridden(patcher: Any, override: Callable[..., torch.Tensor]) -> Any:
    """With another attention, as other packs put it in by ComfyUI's own way."""
    clone = patcher.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = override
    return clone


@pytest.mark.parametrize(("precision", "hot"), [("inherit", True), ("fp16", False), ("fp16", True)])
@pytest.mark.parametrize(
    ("family", "override"),
    [(family, override) for override in (_around, _in_its_own_way) for family in ("sd15", "flux")]
    + [("sd15", override) for override in (_of_some, _of_later_blocks, _of_a_folder, _by_a_kernel_later)],
)
def test_what_another_pack_does_to_attention_stays(family: str, override: Any, precision: str, hot: bool) -> None:
    """Regional prompts are such: in a rerun, and with every layer protected."""
    model, exact = with_its_twin(family, hot=hot)
    right = sample(overridden(exact, override))
    assert difference(sample(exact), right) > 5e-2
    assert difference(sample(guarded(overridden(model, override), precision=precision)), right) <= 1e-2
    assert "fails in float32" not in said[-1]


@pytest.mark.parametrize(("precision", "hot"), [("inherit", True), ("fp16", False)])
@pytest.mark.parametrize("kernel", [_in_half_alone, lambda *args, **kwargs: torch.nan * _as_it_is(*args, **kwargs)])
def test_a_kernel_that_gives_way_leaves_nothing(kernel: Any, precision: str, hot: bool) -> None:
    model, exact = with_its_twin("sd15", hot=hot)
    made = sample(guarded(overridden(model, kernel), precision=precision))
    assert difference(made, sample(exact)) <= 5e-3
    assert precision == "inherit" or said[-1].split("\n")[0].endswith("3 steps, all fine.")
    refuses = "'_in_half_alone', another pack's attention, fails in float32: PyTorch's took its place" in said[-1]
    assert refuses is (kernel is _in_half_alone)


@pytest.mark.parametrize(
    ("module", "name", "is_one"),
    [
        ("/home/sage/ComfyUI/custom_nodes/ComfyUI-KJNodes.nodes.model_nodes", "attention_override_sage", True),
        ("/flash/ComfyUI/custom_nodes/a_pack", "PatchSageAttention.patch.<locals>.override", True),
        ("/custom_nodes/ComfyUI-xFormers.nodes", "override", True),
        ("sageattention.core", "sageattn", True),
        ("flash_attn", "run", True),
        ("comfy.model_patcher", "set.<locals>.override", True),
        ("/home/sage/custom_nodes/a_pack_x_2.usage", "Message.passage", False),
        ("nag", "message_attention", False),
        ("nag", "MESSAGE_PASSAGE", False),
        ("a_pack", "UsageAttention", False),
        ("a_pack", "SAGEattention", True),
        ("a_pack", "kj_FlashAttention", True),
    ],
)
def test_kernels_are_known_by_their_names_and_not_by_where_they_lie(module: str, name: str, is_one: bool) -> None:
    override = lambda *_: None  # noqa: E731
    override.__module__, override.__qualname__ = module, name
    assert calls._is_known_kernel(override) is is_one


def test_another_packs_attention_gives_way_in_the_rerun() -> None:
    """It is for half precision alone."""
    seen: list[torch.dtype] = []

    @witness
    def override(_chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(q.dtype)
        return ATTENTION.attention_pytorch(q, *args, **kwargs)

    hot, twin = with_its_twin("sd15", hot=True)
    assert torch.equal(sample(overridden(guarded(hot), override)), sample(twin))
    assert {*seen} == {HALF, SINGLE}


@pytest.mark.parametrize(
    ("card", "dtype", "hot", "seen"),
    [
        ("sm80", HALF, False, {(HALF, "0, False")}),
        ("sm80", HALF, True, {(HALF, "0, False"), (SINGLE, "0, False")}),
        ("sm70", HALF, False, {(HALF, "1, True")}),
        ("sm80", torch.bfloat16, False, {(torch.bfloat16, "unset, True")}),
    ],
)
def test_the_accumulation_switches_are_held_while_a_call_runs(
    card: str, dtype: torch.dtype, hot: bool, seen: set[Any]
) -> None:
    """On a card that sums wrong in half precision, and on one that does not."""
    found: set[Any] = set()

    @witness
    def look(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.add((x.dtype, _switches()))
        return executor(x, *args, **kwargs)

    before = _switches()
    with on(card):
        sample(guarded(wrapped(make_model("sd15", dtype, hot=hot), look)))
    assert found == seen and _switches() == before
    assert ("half-precision accumulation" in said[-1]) == (dtype is HALF)


def test_the_accumulation_switches_are_put_back_after_an_error() -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise ValueError(_switches())

    before = _switches()
    broken = guarded(wrapped(make_model("sd15"), raises))
    assert error_of(lambda: sample(broken)).startswith("ValueError: 0, ")  # nobody reported the CPU's
    assert _switches() == before


def _switches() -> str:
    attention = os.environ.get("ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION", "unset")
    return f"{attention}, {torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction}"


@pytest.mark.parametrize("family", ["sd15", "svd", "flux"])
def test_a_fault_in_one_step_costs_one_step(family: str) -> None:
    calls: list[int] = []

    @witness
    def fault(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        made = executor(*args, **kwargs)
        return made * torch.inf if len(calls) == 2 else made

    healthy, twin = with_its_twin(family)
    assert 0 < difference(sample(guarded(wrapped(healthy, fault))), sample(twin)) <= 2e-2
    assert "3 steps, 1 recomputed in fp32." in said[-1]


Hide = Callable[[torch.Tensor], torch.Tensor]


def _by_method(patcher: Any, hide: Hide) -> None:
    block = patcher.model.diffusion_model.out
    block.forward = lambda x, forward=block.forward: hide(forward(x))


def _by_module(patcher: Any, hide: Hide) -> None:
    class Another(torch.nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return hide(super().forward(input))

    patcher.add_object_patch("diffusion_model.out", Another(*patcher.model.diffusion_model.out))


def _by_an_option_of_later_calls(patcher: Any, hide: Hide) -> None:
    """As ComfyUI's hooks of one prompt put them in."""
    calls: list[int] = []

    def call_model(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        calls.append(1)
        options = call["c"]["transformer_options"]
        if len(calls) > 1:
            options = options | {"patches": {"attn1_output_patch": [lambda made, _: hide(made)]}}
        return apply_model(call["input"], call["timestep"], **call["c"] | {"transformer_options": options})

    patcher.set_model_unet_function_wrapper(call_model)


def _by_hook(patcher: Any, hide: Hide) -> None:
    patcher.model.diffusion_model.out.register_forward_hook(lambda module, args, made: hide(made))


HIDING: dict[str, Callable[[Any, Hide], Any]] = {  # gives a patcher, or changes the one that it is given
    "wrapper": lambda patcher, hide: wrapped(patcher, lambda run, *args, **kwargs: hide(run(*args, **kwargs))),
    "patch": lambda patcher, hide: patcher.set_model_attn1_output_patch(lambda made, _: hide(made)),
    "attention": lambda patcher, hide: overridden(patcher, lambda run, *args, **kwargs: hide(run(*args, **kwargs))),
    "method": _by_method,
    "module": _by_module,
    "hook": _by_hook,
    "an option of later calls": _by_an_option_of_later_calls,
}


@pytest.mark.parametrize("by", HIDING)
def test_a_patch_that_hides_an_overflow_in_a_later_step_alone_is_seen(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI-NAG normalises from one timestep on to another, by a method in place of the network's."""
    (patcher, twin), calls = with_its_twin("sd15"), list[int]()
    exact = sample(twin)
    network = type(patcher.model.diffusion_model)
    plain = network.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        return plain(self, *args, **kwargs)

    def hide(made: torch.Tensor) -> torch.Tensor:
        end = torch.finfo(made.dtype).max
        return (made * 1e9).clamp(-end, end) / 1e9 if len(calls) > 1 else made

    monkeypatch.setattr(network, "forward", counted)
    made = sample(guarded(HIDING[by](patcher, hide) or patcher))
    assert difference(made, exact) <= 2e-2
    assert "3 steps, 2 recomputed in fp32" in said[-1]


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_model_alone_calls_no_code_of_others(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    calls_others = guards.calls_others

    def noted(thorough: bool, **call: Any) -> bool:
        own = type(call["executor"].class_obj.diffusion_model).__module__ == "native_newer"
        seen.append(not own and calls_others(thorough, **call))
        return seen[-1]

    monkeypatch.setattr(guards, "calls_others", noted)
    sample(guarded(make_model(family)))
    assert not any(seen)


@pytest.mark.parametrize("inserted", [False, True])
def test_a_node_that_computes_the_model_by_itself_is_told(inserted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """DeepCache calls the network's parts in place of the model."""
    model, called = make_model("sd15", hot=True), list[int]()

    @witness
    def by_itself(_apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
        called.append(1)
        return torch.zeros_like(given["input"])

    model.set_model_unet_function_wrapper(by_itself)
    sample(guarded(model, inserted=inserted))
    assert called and any(line.startswith("NaN Guard: Not guarded: ComfyUI made no call") for line in caplog.messages)
    assert inserted or said[-1].startswith("Not guarded: ComfyUI made no call")
