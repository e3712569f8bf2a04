"""The guarded MODEL where weights are brought to the card as its layers run, on a simulated one: run in ComfyUI's
interpreter, judged in test_native_streamed.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import node, said
from native_models import HOT_DECODER, LAYOUTS, in_fp32, make_model, make_vae, sample, vae_in_fp32
from simulated_card import DYNAMIC, MANAGEMENT, OnHost, card, on_host

KINDS = import_module("comfy.patcher_extension").WrappersMP
SD15 = LAYOUTS["sd15"]
LINEAR = "diffusion_model.middle_block.1.transformer_blocks.0.ff.net.2.weight"
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"streams": card}
if DYNAMIC:
    WAYS["dynamic"] = partial(card, dynamic=True)
    WAYS["dynamic, little room"] = partial(card, dynamic=True, room=1 << 17)
    WAYS["dynamic, no room"] = partial(card, dynamic=True, room=0, pinned=False)
RUNS: dict[str, tuple[Any, ...]] = {  # layout, dtype of the weights, and what they are cast to
    **{f"{name}, fp16": (name, torch.float16, None) for name in ("sd15", "flux", "wan")},
    "sd15, fp32 computed in fp16": ("sd15", torch.float32, torch.float16),
}


def guarded(patcher: Any, **policy: Any) -> Any:
    return node("model", patcher, **policy)


def streamed(patcher: Any, way: str) -> Any:
    return on_host(patcher, dynamic=way.startswith("dynamic"))


@contextmanager
def counting_moves() -> Iterator[list[int]]:
    """How often a weight came from the host while a layer ran."""
    moves: list[int] = []
    ops = import_module("comfy.ops")
    original = ops.cast_bias_weight

    def cast_bias_weight(layer: Any, *args: Any, **kwargs: Any) -> Any:
        moves.extend([1] * isinstance(layer.weight, OnHost))
        return original(layer, *args, **kwargs)

    ops.cast_bias_weight = cast_bias_weight
    try:
        yield moves
        assert ops.cast_bias_weight is cast_bias_weight, "the guard puts back what was there"
    finally:
        ops.cast_bias_weight = original


def case_runs() -> dict[str, Any]:
    results: dict[str, Any] = {"ways": list(WAYS)}
    for run, (name, *weights) in RUNS.items():
        layout = LAYOUTS[name]
        healthy, hot = make_model(layout, *weights), make_model(layout, *weights, hot=True)
        results[f"{run}, fp32"] = sample(in_fp32(hot, layout), layout)
        for way, made in WAYS.items():
            with made(), counting_moves() as moves:
                results[f"{run}, {way}, healthy plain"] = sample(streamed(healthy, way), layout)
                results[f"{run}, {way}, moves"] = len(moves)
            with made():
                results[f"{run}, {way}, healthy guarded"] = sample(guarded(streamed(healthy, way)), layout)
            with made(), counting_moves():
                said.clear()
                results[f"{run}, {way}, guarded"] = sample(guarded(streamed(hot, way)), layout)
                results[f"{run}, {way}, said"] = said[-1]
    return results


def with_lora(patcher: Any, key: str = LINEAR) -> Any:
    """A clone with patches as ComfyUI reads them from a LoRA's file."""
    generator = torch.Generator().manual_seed(3)
    many, few = patcher.model.get_parameter(key).shape
    down, up = (torch.randn(shape, generator=generator).half() for shape in ((4, few), (many, 4)))
    file = {"here.lora_down.weight": down, "here.lora_up.weight": up, "here.alpha": torch.tensor(1.0)}
    patched = patcher.clone()
    patched.add_patches(import_module("comfy.lora").load_lora(file, {"here": key}), 0.8)
    return patched


def case_lora() -> dict[str, Any]:
    hot = make_model(SD15, hot=True)
    exact = in_fp32(hot, SD15)
    results: dict[str, Any] = {"fp32 without": sample(exact, SD15), "fp32": sample(with_lora(exact), SD15)}
    for way, made in WAYS.items():
        with made():
            results[way] = sample(guarded(with_lora(streamed(hot, way))), SD15)
    return results


def case_prefetch() -> dict[str, Any]:
    """Blocks whose weights are brought ahead of them, as LTX-2 and MiniMax H3 have it."""
    if not DYNAMIC:
        return {}
    prefetch = import_module("comfy.model_prefetch")
    layout = LAYOUTS["wan"]
    hot = make_model(layout, hot=True)
    exact = in_fp32(hot, layout)
    key = "diffusion_model.blocks.0.ffn.2.weight"
    results: dict[str, Any] = {"fp32": sample(exact, layout), "fp32, LoRA": sample(with_lora(exact, key), layout)}
    ahead: list[bool] = []

    def around(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        blocks = hot.model.diffusion_model.blocks
        queue = prefetch.make_prefetch_queue(list(blocks), x.device, args[-1])

        def fetch(block: Any, _: Any) -> None:
            prefetch.prefetch_queue_pop(queue, x.device, block)
            ahead.append(hasattr(block.ffn[0], "_prefetch"))

        hooks = [block.register_forward_pre_hook(fetch) for block in blocks]
        try:
            made = executor(x, *args, **kwargs)
            prefetch.prefetch_queue_pop(queue, x.device, None)
        finally:
            for hook in hooks:
                hook.remove()
        return made

    for way in ("dynamic", "dynamic, no room"):
        with WAYS[way]():
            patcher = guarded(streamed(hot, way))
            patcher.add_wrapper_with_key(KINDS.DIFFUSION_MODEL, "prefetch", around)
            results[way] = sample(patcher, layout)
            results[f"{way}, LoRA"] = sample(with_lora(patcher, key), layout)
    return results | {"ahead": all(ahead) and len(ahead) > 0}


def case_another_model() -> dict[str, Any]:
    """A patch that loads a model of its own, with a LoRA, in the rerun alone."""
    hot, other = make_model(SD15, hot=True), with_lora(make_model(SD15))
    calls: list[int] = []

    def weight() -> torch.Tensor:
        return other.model.get_parameter(LINEAR)

    def loads(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            MANAGEMENT.load_models_gpu([other])
        return executor(*args, **kwargs)

    patcher = guarded(hot)
    patcher.add_wrapper_with_key(KINDS.DIFFUSION_MODEL, "loads", loads)
    sample(patcher, SD15)
    inside = weight().detach().clone()
    other.detach()
    MANAGEMENT.load_models_gpu([other])
    return {"inside": inside, "outside": weight()}


def case_vae() -> dict[str, Any]:
    latents = torch.randn((1, 4, 4, 4), generator=torch.Generator().manual_seed(4)).half().float()
    results: dict[str, Any] = {}
    for way, made in WAYS.items():
        vae = make_vae(torch.float16, HOT_DECODER)
        exact = vae_in_fp32(vae)
        with made(), torch.inference_mode():
            results["fp32"] = exact.decode(latents)
            vae.patcher = streamed(vae.patcher, way)
            results[f"{way}, plain"] = vae.decode(latents)
            results[way] = node("vae", vae).decode(latents)
    return results
