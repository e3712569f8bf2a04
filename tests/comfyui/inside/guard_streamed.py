"""NaN Guard with weights that ComfyUI streams to the card: async offload and dynamic VRAM, by ComfyUI's code on a
simulated card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from in_comfyui import difference, guarded, node, texts, wrapped
from native_models import HOT_DECODER, RECENT, make_model, make_vae, sample, vae_in_fp32, with_fp32_twin
from simulated_card import DYNAMIC, MANAGEMENT, OnHost, card, on_host

OPS = import_module("comfy.ops")
LINEAR = "diffusion_model.middle_block.1.transformer_blocks.0.ff.net.2.weight"
WAYS: dict[str, Callable[[], AbstractContextManager[None]]] = {"streams": card}
if DYNAMIC:
    WAYS["dynamic"] = partial(card, dynamic=True)
    WAYS["dynamic, little room"] = partial(card, dynamic=True, room=1 << 17)
    WAYS["dynamic, no room"] = partial(card, dynamic=True, room=0, pinned=False)
RESIDENT = ("dynamic", "dynamic, little room")  # weights stay on the card, with merged LoRAs, rounded to fp16
RUNS: dict[str, tuple[Any, ...]] = {  # layout, dtype of the weights, and the dtype they are cast to
    **{f"{name}, fp16": (name, torch.float16, None) for name in ("sd15", "flux", "wan", *RECENT)},
    "sd15, fp32 computed in fp16": ("sd15", torch.float32, torch.float16),
}


def streamed(patcher: Any, way: str) -> Any:
    return on_host(patcher, dynamic=way.startswith("dynamic"))


@contextmanager
def counting_moves() -> Iterator[list[int]]:
    """Record each weight that comes from the host while a layer runs."""
    moves: list[int] = []
    original = OPS.cast_bias_weight

    def cast_bias_weight(layer: Any, *args: Any, **kwargs: Any) -> Any:
        moves.extend([1] * isinstance(layer.weight, OnHost))
        return original(layer, *args, **kwargs)

    with patch.object(OPS, "cast_bias_weight", cast_bias_weight):
        yield moves
        assert OPS.cast_bias_weight is cast_bias_weight, "the guard restores the function"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_streamed_model_is_bit_equal_or_recomputed_near_fp32(run: str, way: str) -> None:
    healthy, (hot, twin) = make_model(*RUNS[run]), with_fp32_twin(*RUNS[run], hot=True)
    exact = sample(twin)
    with WAYS[way](), counting_moves() as moves:
        plain = sample(streamed(healthy, way))
    assert moves
    with WAYS[way]():
        assert torch.equal(sample(guarded(streamed(healthy, way))), plain)
    with WAYS[way](), counting_moves():
        assert difference(sample(guarded(streamed(hot, way))), exact) <= hot.model.layout.rounds
    assert "3 steps, 3 recomputed in fp32" in texts[-1]


def with_lora(patcher: Any, key: str = LINEAR) -> Any:
    """Return a clone with a LoRA's patches, as ComfyUI reads them from a file."""
    generator = torch.Generator().manual_seed(3)
    many, few = patcher.model.get_parameter(key).shape
    down, up = (torch.randn(shape, generator=generator).half() for shape in ((4, few), (many, 4)))
    file = {"here.lora_down.weight": down, "here.lora_up.weight": up, "here.alpha": torch.tensor(1.0)}
    patched = patcher.clone()
    patched.add_patches(import_module("comfy.lora").load_lora(file, {"here": key}), 0.8)
    return patched


@pytest.mark.parametrize("way", WAYS)
def test_lora_on_streamed_weights_is_in_rerun(way: str) -> None:
    hot, twin = with_fp32_twin("sd15", hot=True)
    without, exact = sample(twin), sample(with_lora(twin))
    with WAYS[way]():
        made = sample(guarded(with_lora(streamed(hot, way))))
    assert difference(without, exact) > 2e-2
    assert difference(made, exact) <= (2e-3 if way in RESIDENT else 1e-5)


@pytest.mark.skipif(not DYNAMIC, reason="this ComfyUI has no dynamic VRAM")
@pytest.mark.parametrize("way", ["dynamic", "dynamic, no room"])
def test_prefetched_weights_are_used_in_rerun(way: str) -> None:
    """LTX-2 and MiniMax H3 prefetch a block's weights like this."""
    prefetch = import_module("comfy.model_prefetch")
    key = "diffusion_model.blocks.0.ffn.2.weight"
    hot, twin = with_fp32_twin("wan", hot=True)
    exact, exact_with_lora = sample(twin), sample(with_lora(twin, key))
    prefetched: list[bool] = []

    def around(executor: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        blocks = hot.model.diffusion_model.blocks
        queue = prefetch.make_prefetch_queue(list(blocks), x.device, args[-1])

        def fetch(block: Any, _: Any) -> None:
            prefetch.prefetch_queue_pop(queue, x.device, block)
            prefetched.append(hasattr(block.ffn[0], "_prefetch"))

        hooks = [block.register_forward_pre_hook(fetch) for block in blocks]
        try:
            made = executor(x, *args, **kwargs)
            prefetch.prefetch_queue_pop(queue, x.device, None)
        finally:
            for hook in hooks:
                hook.remove()
        return made

    with WAYS[way]():
        patcher = wrapped(guarded(streamed(hot, way)), around)
        made, made_with_lora = sample(patcher), sample(with_lora(patcher, key))
    assert prefetched and all(prefetched)
    assert difference(made, exact) <= 1e-5
    assert difference(made_with_lora, exact) > 1e-3
    assert difference(made_with_lora, exact_with_lora) <= (2e-3 if way in RESIDENT else 1e-5)


def test_model_loaded_during_rerun_keeps_fp16_weights() -> None:
    """During the rerun, a patch load_other_model another model with a LoRA."""
    hot, other = make_model("sd15", hot=True), with_lora(make_model("sd15"))
    calls: list[int] = []

    def load_other_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            MANAGEMENT.load_models_gpu([other])
        return executor(*args, **kwargs)

    sample(wrapped(guarded(hot), load_other_model))
    inside = other.model.get_parameter(LINEAR).detach().clone()
    other.detach()
    MANAGEMENT.load_models_gpu([other])
    assert inside.dtype is torch.float16
    assert torch.equal(inside, other.model.get_parameter(LINEAR))


@pytest.mark.parametrize("way", WAYS)
def test_streamed_vae_is_recomputed_in_fp32(way: str) -> None:
    latents = torch.randn((1, 4, 4, 4), generator=torch.Generator().manual_seed(4)).half().float()
    vae = make_vae(torch.float16, HOT_DECODER)
    exact = vae_in_fp32(vae)
    with WAYS[way](), torch.inference_mode():
        right = exact.decode(latents)
        vae.patcher = streamed(vae.patcher, way)
        assert not vae.decode(latents).isfinite().all()
        assert difference(node("vae", vae).decode(latents), right) <= 1e-5
