"""NaN Guard (native) combined with wrappers of other packs, LoRAs, torch.compile and every attention function."""

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
from in_comfyui import as_comfyui_code, difference, error_of, guarded, module, on, texts, wrapped
from native_models import LAYOUTS, in_fp32, make_model, sample, with_fp32_twin

ATTENTION = import_module("comfy.ldm.modules.attention")
calls = module("comfyui_host.model_calls")
guards = module("comfyui_host.native_guards")
HALF, SINGLE = torch.float16, torch.float32
ATTENTIONS = {"sd15": 14, "flux": 4}  # attention calls per step


def test_wrappers_of_other_packs_are_called_in_rerun() -> None:
    """The wrappers are added before or after the guard."""
    hot, twin = with_fp32_twin("sd15", hot=True)
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


def test_lora_added_after_guard_is_in_rerun() -> None:
    """guard_beside.py tests a LoRA that is added before the guard."""
    hot, twin = with_fp32_twin("sd15", hot=True)
    without, made = sample(twin), sample(patcher := lora_on(guarded(hot)))
    exact = sample(in_fp32(patcher))  # the LoRA is merged into the weights now
    assert difference(made, exact) <= 1e-5
    assert difference(without, exact) > 2e-2
    assert torch.isnan(sample(hot)).all()


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize(
    ("family", "hot", "part"),
    [("sd15", True, "diffusion_model.out"), ("flux", False, "diffusion_model"), ("flux", True, "diffusion_model")],
)
def test_compiled_model_with_guard_is_bit_equal_to_eager_model(family: str, hot: bool, part: str, order: str) -> None:
    model, twin = with_fp32_twin(family, hot=hot)
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
def test_rerun_is_near_fp32_with_every_attention(name: str, dtypes: set[torch.dtype]) -> None:
    """CUDA attentions have stand-in kernels. dtypes: the dtypes that these kernels get."""
    hot, twin = with_fp32_twin("sd15", hot=True)
    with _chosen(name) as seen:
        made = sample(guarded(hot))
    assert difference(made, sample(twin)) <= 1e-5
    assert set(seen) == dtypes


@pytest.mark.parametrize("name", ["basic", "sub_quad", "split", "xformers", "sage", "flash"])
@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_overflow_protection_always_uses_unchanged(family: str, name: str) -> None:
    """PyTorch's attention multiplies in half precision. The others would use float32, or reject mixed dtypes."""
    hot, twin = with_fp32_twin(family, hot=True)
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
    """Choose an attention, and yield the dtypes that its stand-in kernel gets."""
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


def _unchanged(_chosen: Any, q: Any, k: Any, v: Any, heads: int, *_: Any, **more: Any) -> torch.Tensor:
    return ATTENTION.attention_pytorch(q, k, v, heads, **more)


def _scaled_result(chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return 1.5 * chosen(*args, **kwargs) + 0.3


def _scaled_query(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _unchanged(chosen, 3 * q, *args, **kwargs)


def _of_cross_attention(chosen: Any, q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Change only cross-attention."""
    return (_scaled_query if q.shape != k.shape else _unchanged)(chosen, q, k, *args, **kwargs)


def _of_output_blocks(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Change only attention of the output blocks."""
    block = kwargs["transformer_options"].get("block", ("",))[0]
    return (_scaled_query if block == "output" else _unchanged)(chosen, q, *args, **kwargs)


class Refused(Exception):
    """Raised like a kernel compiler's error, which is not a RuntimeError."""


def _half_only(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if q.dtype is SINGLE:
        raise Refused
    return _unchanged(chosen, q.nan_to_num(), *args, **kwargs)


def _by_a_kernel_later(chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Read the query's address from the second step on, as a kernel does."""
    if kwargs["transformer_options"]["sigmas"].max() < 14:
        q.data_ptr()
    return _scaled_query(chosen, q, *args, **kwargs)


def _of_a_folder(_chosen: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _scaled_result(_chosen, *args, **kwargs)


_of_a_folder.__module__ = "/home/sage/flash message/custom_nodes/a_pack_x_2.usage"


def overridden(patcher: Any, override: Callable[..., torch.Tensor]) -> Any:
    """Set an attention override, as other packs do with ComfyUI's option."""
    clone = patcher.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = override
    return clone


@pytest.mark.parametrize(("precision", "hot"), [("inherit", True), ("fp16", False), ("fp16", True)])
@pytest.mark.parametrize(
    ("family", "override"),
    [(family, override) for override in (_scaled_result, _scaled_query) for family in ("sd15", "flux")]
    + [("sd15", override) for override in (_of_cross_attention, _of_output_blocks, _of_a_folder, _by_a_kernel_later)],
)
def test_attention_override_of_other_pack_is_kept(family: str, override: Any, precision: str, hot: bool) -> None:
    """Regional prompts are an example. The override is kept in reruns and with overflow protection."""
    model, exact = with_fp32_twin(family, hot=hot)
    right = sample(overridden(exact, override))
    assert difference(sample(exact), right) > 5e-2
    assert difference(sample(guarded(overridden(model, override), precision=precision)), right) <= 1e-2
    assert "fails in float32" not in texts[-1]


@pytest.mark.parametrize(("precision", "hot"), [("inherit", True), ("fp16", False)])
@pytest.mark.parametrize("kernel", [_half_only, lambda *args, **kwargs: torch.nan * _unchanged(*args, **kwargs)])
def test_failing_attention_kernel_is_replaced_by_unchanged(kernel: Any, precision: str, hot: bool) -> None:
    model, exact = with_fp32_twin("sd15", hot=hot)
    made = sample(guarded(overridden(model, kernel), precision=precision))
    assert difference(made, sample(exact)) <= 5e-3
    assert precision == "inherit" or texts[-1].split("\n")[0].endswith("3 steps, all fine.")
    refuses = "attention '_half_only' of another pack fails in float32: replaced by PyTorch's" in texts[-1]
    assert refuses is (kernel is _half_only)


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
def test_attention_kernels_are_known_by_name_not_by_path(module: str, name: str, is_one: bool) -> None:
    override = lambda *_: None  # noqa: E731
    override.__module__, override.__qualname__ = module, name
    assert calls._is_known_kernel(override) is is_one


def test_rerun_with_override_of_plain_attention_is_bit_equal_to_fp32() -> None:
    """The override computes PyTorch's attention, as a kernel does."""
    seen: list[torch.dtype] = []

    @as_comfyui_code
    def override(_chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(q.dtype)
        return ATTENTION.attention_pytorch(q, *args, **kwargs)

    hot, twin = with_fp32_twin("sd15", hot=True)
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
def test_accumulation_switches_are_set_during_calls_and_restored(
    card: str, dtype: torch.dtype, hot: bool, seen: set[Any]
) -> None:
    """Tested for cards whose half-precision sums are wrong, and for one whose sums are correct."""
    found: set[Any] = set()

    @as_comfyui_code
    def look(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found.add((x.dtype, _switches()))
        return executor(x, *args, **kwargs)

    before = _switches()
    with on(card):
        sample(guarded(wrapped(make_model("sd15", dtype, hot=hot), look)))
    assert found == seen and _switches() == before
    assert ("half-precision accumulation" in texts[-1]) == (dtype is HALF)


def test_accumulation_switches_are_restored_after_error() -> None:
    def raises(*_: Any, **__: Any) -> Any:
        raise ValueError(_switches())

    before = _switches()
    broken = guarded(wrapped(make_model("sd15"), raises))
    assert error_of(lambda: sample(broken)).startswith("ValueError: 0, ")  # no result is known for a CPU
    assert _switches() == before


def _switches() -> str:
    attention = os.environ.get("ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION", "unset")
    return f"{attention}, {torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction}"


@pytest.mark.parametrize("family", ["sd15", "svd", "flux"])
def test_fault_in_one_step_recomputes_one_step(family: str) -> None:
    calls: list[int] = []

    @as_comfyui_code
    def fault(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        made = executor(*args, **kwargs)
        return made * torch.inf if len(calls) == 2 else made

    healthy, twin = with_fp32_twin(family)
    assert 0 < difference(sample(guarded(wrapped(healthy, fault))), sample(twin)) <= 2e-2
    assert "3 steps, 1 recomputed in fp32." in texts[-1]


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
    """Add a patch to options of later calls, as ComfyUI's hooks of one prompt do."""
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


HIDING: dict[str, Callable[[Any, Hide], Any]] = {  # returns a patcher, or changes the given one
    "wrapper": lambda patcher, hide: wrapped(patcher, lambda run, *args, **kwargs: hide(run(*args, **kwargs))),
    "patch": lambda patcher, hide: patcher.set_model_attn1_output_patch(lambda made, _: hide(made)),
    "attention": lambda patcher, hide: overridden(patcher, lambda run, *args, **kwargs: hide(run(*args, **kwargs))),
    "method": _by_method,
    "module": _by_module,
    "hook": _by_hook,
    "an option of later calls": _by_an_option_of_later_calls,
}


@pytest.mark.parametrize("by", HIDING)
def test_overflow_hidden_by_patch_in_later_steps_is_recomputed(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI-NAG normalises between two timesteps, with a method that replaces the network's."""
    (patcher, twin), calls = with_fp32_twin("sd15"), list[int]()
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
    assert "3 steps, 2 recomputed in fp32" in texts[-1]


@pytest.mark.parametrize("by", HIDING)
def test_overflow_hidden_by_patch_is_recomputed_once(by: str) -> None:
    """No layer's output has it."""
    patcher, twin = with_fp32_twin("sd15")

    def hide(made: torch.Tensor) -> torch.Tensor:
        end = torch.finfo(made.dtype).max
        return (made * 1e9).clamp(-end, end) / 1e9

    made = sample(guarded(HIDING[by](patcher, hide) or patcher, scope="learned"))
    assert difference(made, sample(twin)) <= 2e-2
    assert "3 steps, 1 recomputed in fp32" in texts[-1]


@pytest.mark.parametrize("family", LAYOUTS)
def test_unpatched_model_calls_no_code_of_others(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_node_that_bypasses_model_is_reported(inserted: bool, caplog: pytest.LogCaptureFixture) -> None:
    """DeepCache calls parts of the network instead of the model."""
    model, called = make_model("sd15", hot=True), list[int]()

    @as_comfyui_code
    def by_itself(_apply_model: Any, given: dict[str, Any]) -> torch.Tensor:
        called.append(1)
        return torch.zeros_like(given["input"])

    model.set_model_unet_function_wrapper(by_itself)
    sample(guarded(model, inserted=inserted))
    assert called and any(line.startswith("NaN Guard: Not guarded: ComfyUI did not call") for line in caplog.messages)
    assert inserted or texts[-1].startswith("Not guarded: ComfyUI did not call")
