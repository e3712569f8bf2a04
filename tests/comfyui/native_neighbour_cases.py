"""The guarded MODEL beside other packs' wrappers, LoRAs, compilation and attention: run in ComfyUI's interpreter,
judged in test_native_neighbours.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import CPU, LAYOUTS, in_fp32, make_model, sample

SD15, FLUX = LAYOUTS["sd15"], LAYOUTS["flux"]
KINDS = import_module("comfy.patcher_extension").WrappersMP
LINEAR = "diffusion_model.middle_block.1.transformer_blocks.0.ff.net.2.weight"


def guarded(patcher: Any, **policy: Any) -> Any:
    return node("model", patcher, **policy)


def case_wrappers() -> dict[str, Any]:
    """Wrappers of other packs, put on before the guard and after it: each is still called, and has its effect."""
    results: dict[str, Any] = {}
    hot = make_model(SD15, hot=True)
    for order in ("before", "after"):
        called: list[str] = []
        patcher = _wrapped(hot.clone(), called) if order == "before" else guarded(hot)
        patcher = guarded(patcher) if order == "before" else _wrapped(patcher.clone(), called)
        results[f"{order}, guarded"] = sample(patcher, SD15)
        results[f"{order}, called"] = sorted(set(called))
    results["fp32"] = sample(_wrapped(in_fp32(hot, SD15), []), SD15)
    results["fp32, not wrapped"] = sample(in_fp32(hot, SD15), SD15)
    return results


def _wrapped(patcher: Any, called: list[str]) -> Any:
    def unet_function(apply_model: Any, call: dict[str, Any]) -> torch.Tensor:
        called.append("unet function")
        return apply_model(call["input"], call["timestep"], **call["c"]) * 0.9

    def chained(kind: str) -> Callable[..., Any]:
        def wrapper(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            called.append(kind)
            return executor(x * 1.1, *args, **kwargs)

        return wrapper

    patcher.set_model_unet_function_wrapper(unet_function)
    for kind in (KINDS.APPLY_MODEL, KINDS.DIFFUSION_MODEL):
        patcher.add_wrapper_with_key(kind, "another pack", chained(kind))
    return patcher


def case_easycache() -> dict[str, Any]:
    """It skips the model where little changes, by what it remembers; Flux, where an overflow is finite and wrong.

    In place of the model it adds to what the model is given. In half precision that is a copy of the sampler's latents,
    in fp32 it is the latents themselves, which comes out otherwise: so the exact run has a copy too.
    """
    cache = import_module("comfy_extras.nodes_easycache").EasyCacheNode
    kinds = import_module("comfy.patcher_extension").WrappersMP
    hot = make_model(FLUX, hot=True)
    exact = in_fp32(hot, FLUX)
    exact.add_wrapper_with_key(
        kinds.DIFFUSION_MODEL, "copy", lambda run, x, *more, **named: run(x.clone(), *more, **named)
    )
    results: dict[str, Any] = {}
    for name, patcher in (("guarded", guarded(hot)), ("fp32", exact), ("plain", hot)):
        cached = cache.execute(patcher, 0.3, 0.15, 0.95, False).args[0]
        calls: list[int] = []
        hook = cached.model.diffusion_model.double_blocks[0].register_forward_hook(lambda *_, c=calls: c.append(1))
        results[name] = sample(cached, FLUX, steps=8)
        hook.remove()
        results[f"{name} calls"] = len(calls)
    return results | {"said": said[-1]}


def case_lora() -> dict[str, Any]:
    """A LoRA on the guarded MODEL, with all weights loaded and with weights that ComfyUI casts as it goes (lowvram)."""
    hot = make_model(SD15, hot=True)
    down, up = (
        torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n, shape in enumerate([(64, 256)] * 2)
    )
    patch = {LINEAR: ("diff", (0.05 * (down + up),))}
    twin, plain = in_fp32(hot, SD15), in_fp32(hot, SD15)
    twin.add_patches(patch, 1.0)
    results = {"fp32": sample(twin, SD15), "fp32 without": sample(plain, SD15)}
    for order, patcher in (("after", guarded(hot).clone()), ("before", hot.clone())):
        patcher.add_patches(patch, 1.0)
        results[f"{order}, guarded"] = sample(patcher if order == "after" else guarded(patcher), SD15)
    results["unchanged"] = bool(torch.isnan(sample(hot, SD15)).all())
    low = make_model(SD15, hot=True)
    whole = in_fp32(low, SD15)
    for name, patcher in (("lowvram, guarded", guarded(low)), ("lowvram, fp32", whole)):
        patcher.add_patches(patch, 1.0)
        patcher.load(CPU, lowvram_model_memory=1 if "guarded" in name else 0, full_load="fp32" in name)
        results[name] = _denoise(patcher)
    results["lowvram layers"] = sum(hasattr(layer, "prev_comfy_cast_weights") for layer in low.model.modules())
    return results


def _denoise(patcher: Any) -> torch.Tensor:
    """One call of the model, as a sampler makes it."""
    generator = torch.Generator().manual_seed(2)
    latents, context = (torch.randn(shape, generator=generator) for shape in (SD15.latents, SD15.context))
    with torch.inference_mode():
        options = {"wrappers": patcher.wrappers}
        return patcher.model.apply_model(latents, torch.tensor([3.0]), c_crossattn=context, transformer_options=options)


def case_compile() -> dict[str, Any]:
    """ComfyUI's own torch.compile, put on before and after the guard; the backend compiles nothing, so that it is
    quick and exact."""
    compile_model = import_module("comfy_api.torch_helpers").set_torch_compile_wrapper
    hot, healthy, clipping = make_model(SD15, hot=True), make_model(FLUX), make_model(FLUX, hot=True)
    results = {"hot, fp32": sample(in_fp32(hot, SD15), SD15), "healthy, plain": sample(healthy, FLUX)}
    results["clipping, fp32"] = sample(in_fp32(clipping, FLUX), FLUX)
    part, whole = ["diffusion_model.out"], ["diffusion_model"]
    for order in ("before", "after"):
        for name, model, layout, parts in (
            ("hot", hot, SD15, part),
            ("healthy", healthy, FLUX, whole),
            ("clipping", clipping, FLUX, whole),
        ):
            torch.compiler.reset()
            patcher = model.clone() if order == "before" else guarded(model).clone()
            compile_model(patcher, backend="eager", keys=parts)
            patcher = guarded(patcher) if order == "before" else patcher
            results[f"{name}, {order}"] = sample(patcher, layout)
    return results


def case_attention() -> dict[str, Any]:
    """Every attention that ComfyUI chooses from, those for CUDA with stand-ins for their kernels."""
    results: dict[str, Any] = {}
    hot = make_model(SD15, hot=True)
    attention = import_module("comfy.ldm.modules.attention")
    for name in ("basic", "sub_quad", "split", "pytorch", "xformers", "sage", "flash"):
        with _chosen(attention, name) as kernel:
            results[f"{name}, guarded"] = sample(guarded(hot), SD15)
            results[f"{name}, kernel"] = sorted(set(map(str, kernel)))
    results["fp32"] = sample(in_fp32(hot, SD15), SD15)
    return results


@contextmanager
def _chosen(attention: Any, name: str) -> Iterator[list[torch.dtype]]:
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
        "optimized_attention": getattr(attention, f"attention_{name}"),
    }
    before = {key: getattr(attention, key) for key in stand_ins if hasattr(attention, key)}
    vars(attention).update(stand_ins)
    try:
        yield seen
    finally:
        vars(attention).update(before)


def case_override() -> dict[str, Any]:
    """Another pack's attention, for half precision alone, by ComfyUI's own way to set one."""
    seen: list[torch.dtype] = []

    def override(_chosen: Any, q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(q.dtype)
        assert q.dtype is torch.float16
        return import_module("comfy.ldm.modules.attention").attention_pytorch(q, *args, **kwargs)

    hot = make_model(SD15, hot=True)
    patcher = guarded(hot)
    patcher.model_options["transformer_options"]["optimized_attention_override"] = override
    results = {"guarded": sample(patcher, SD15), "fp32": sample(in_fp32(hot, SD15), SD15)}
    return results | {"called": sorted(set(map(str, seen)))}


def case_accumulation() -> dict[str, Any]:
    """The switches as the model sees them in each call, on a card that sums wrong in half precision and on one that
    does not; with an attempt, its rerun, and a call that raises."""
    pack = sys.modules["custom_nodes_pack.comfyui_host.networks"]
    rows = sys.modules["custom_nodes_pack.precision.arch"].ARCHITECTURES
    results: dict[str, Any] = {}
    verified = pack.verified_architecture
    before = _switches()
    for card, dtype in (("sm80", torch.float16), ("sm70", torch.float16), ("sm80", torch.bfloat16)):
        for name, model in (("healthy", make_model(SD15, dtype)), ("hot", make_model(SD15, dtype, hot=True))):
            seen: list[str] = []
            patcher = model.clone()
            patcher.add_wrapper_with_key(KINDS.DIFFUSION_MODEL, "look", _looking(seen))
            said.clear()
            pack.verified_architecture = lambda *_, card=card: rows[card]
            try:
                results[f"{card}, {dtype}, {name}"] = sample(guarded(patcher), SD15)
            finally:
                pack.verified_architecture = verified
            results[f"{card}, {dtype}, {name}, seen"] = seen
            results[f"{card}, {dtype}, {name}, said"] = said[-1]
            results[f"{card}, {dtype}, {name}, restored"] = _switches() == before
    broken = make_model(SD15).clone()
    broken.add_wrapper_with_key(KINDS.DIFFUSION_MODEL, "raises", _raising)
    return results | {"error": error_of(lambda: sample(guarded(broken), SD15)), "restored": _switches() == before}


def _switches() -> str:
    attention = os.environ.get("ONEFLOW_ATTENTION_ALLOW_HALF_PRECISION_ACCUMULATION", "unset")
    return f"{attention}, {torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction}"


def _looking(seen: list[str]) -> Callable[..., Any]:
    def wrapper(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(f"{x.dtype}: {_switches()}")
        return executor(x, *args, **kwargs)

    return wrapper


def _raising(_executor: Any, *_args: Any, **_kwargs: Any) -> Any:
    raise ValueError(_switches())


def case_a_fault_in_one_step() -> dict[str, Any]:
    """Steps before and after it stay in half precision."""
    results: dict[str, Any] = {}
    for name in ("sd15", "svd", "flux"):
        layout = LAYOUTS[name]
        healthy = make_model(layout)
        results[f"{name}, fp32"] = sample(in_fp32(healthy, layout), layout)
        faulty = healthy.clone()
        faulty.add_wrapper_with_key(KINDS.DIFFUSION_MODEL, "fault", _fault_in_call(2))
        results[f"{name}, guarded"] = sample(guarded(faulty), layout)
        results[f"{name}, said"] = said[-1]
    return results


def _fault_in_call(number: int) -> Callable[..., Any]:
    calls: list[int] = []

    def wrapper(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        made = executor(x, *args, **kwargs)
        return made * torch.inf if len(calls) == number else made

    return wrapper
