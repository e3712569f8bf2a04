"""What happens to a VAE with and without the guard: run in ComfyUI's interpreter, judged in test_native_vae.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import HOT_DECODER, HOT_ENCODER, make_vae, vae_in_fp32

TILES = {"tile_x": 4, "tile_y": 4, "overlap": 1}
PIXEL_TILES = {"tile_x": 32, "tile_y": 32, "overlap": 8}


def latents(frames: int = 1) -> torch.Tensor:
    """Such that fp16 holds them: ComfyUI casts them before the VAE, guarded or not."""
    return torch.randn((frames, 4, 6, 6), generator=torch.Generator().manual_seed(3)).half().float()


def pixels() -> torch.Tensor:
    return torch.randint(257, (1, 48, 48, 3), generator=torch.Generator().manual_seed(4)) / 256


CALLS: dict[str, Callable[[Any], torch.Tensor]] = {
    "decode": lambda vae: vae.decode(latents()),
    "decode tiled": lambda vae: vae.decode_tiled(latents(), **TILES),
    "encode": lambda vae: vae.encode(pixels()),
    "encode tiled": lambda vae: vae.encode_tiled(pixels(), **PIXEL_TILES),
}


def guarded(vae: Any, **policy: Any) -> Any:
    return node("vae", vae, **policy)


def run(call: Callable[[Any], torch.Tensor], vae: Any) -> torch.Tensor:
    with torch.inference_mode():
        return call(vae)


def case_healthy() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for dtype in (torch.float16, torch.bfloat16):
        vae = make_vae(dtype)
        for name, call in CALLS.items():
            results[f"{name}, {dtype}, plain"] = run(call, vae)
            results[f"{name}, {dtype}, guarded"] = run(call, guarded(vae))
    return results | {"said": list(said)}


def case_overflow() -> dict[str, Any]:
    results: dict[str, Any] = {}
    vae = make_vae(torch.float16, HOT_DECODER | HOT_ENCODER)
    for name, call in CALLS.items():
        said.clear()
        results[f"{name}, plain"] = run(call, vae)
        results[f"{name}, guarded"] = run(call, guarded(vae))
        results[f"{name}, fp32"] = run(call, vae_in_fp32(vae))
        results[f"{name}, said"] = list(said)
        for precision in ("fp16", "bf16"):
            results[f"{name}, {precision}"] = run(call, guarded(vae, precision=precision))
            results[f"{name}, {precision} said"] = list(said)
    return results


def case_temporal() -> dict[str, Any]:
    vae = make_vae(torch.float16, HOT_DECODER, temporal=True)

    def decode(vae: Any) -> torch.Tensor:
        return vae.decode(latents(frames=3))

    fp32 = run(decode, vae_in_fp32(vae, temporal=True))
    return {"plain": run(decode, vae), "guarded": run(decode, guarded(vae)), "fp32": fp32}


def case_one_tile() -> dict[str, Any]:
    """One tile of a picture leaves the range: the others stay in half precision."""
    vae = make_vae(torch.float16)
    hot = latents()
    hot[..., :2, :2] = 6e4

    def decode(vae: Any) -> torch.Tensor:
        return vae.decode_tiled(hot, **TILES)

    return {"plain": run(decode, vae), "guarded": run(decode, guarded(vae)), "said": list(said)} | {
        "fp32": run(decode, vae_in_fp32(vae))
    }


def case_comes_off() -> dict[str, Any]:
    vae = make_vae(torch.float16, HOT_DECODER)
    run(CALLS["decode"], vae)
    before = _state(vae)
    clone = guarded(vae)
    run(CALLS["decode"], clone)
    twice = guarded(clone, on_failure="off")
    return {
        "unchanged": before == _state(vae),
        "plain": run(CALLS["decode"], vae),
        "the last node counts": run(CALLS["decode"], twice),
        "shares weights": _pointers(vae) == _pointers(clone),
        "same class": type(clone) is type(vae) and isinstance(clone.first_stage_model, type(vae.first_stage_model)),
    }


def _pointers(vae: Any) -> list[int]:
    return [weight.data_ptr() for weight in vae.get_sd().values()]


def _state(vae: Any) -> list[Any]:
    layers = list(vae.first_stage_model.modules())
    hooks = [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers]
    return [sorted(vars(vae)), [sorted(vars(layer)) for layer in layers], hooks, _pointers(vae)]


def case_policies() -> dict[str, Any]:
    decode = CALLS["decode"]
    hot, broken, single = make_vae(torch.float16, HOT_DECODER), make_vae(torch.float16), make_vae(torch.float32)
    broken.first_stage_model.decoder.conv_in.weight[0, 0] = torch.nan
    replaced, empty = copy.copy(hot), copy.copy(hot)
    replaced.decode = hot.decode
    empty.first_stage_model = None
    nan = torch.full((1, 4, 6, 6), torch.nan)
    return {
        "stop": error_of(lambda: run(decode, guarded(hot, on_failure="stop"))),
        "off": run(decode, guarded(hot, on_failure="off")),
        "scope run": run(CALLS["decode tiled"], guarded(hot, scope="run")),
        "scope step": run(CALLS["decode tiled"], guarded(hot)),
        "weight": error_of(lambda: run(decode, guarded(broken))),
        "latents": error_of(lambda: run(lambda vae: vae.decode(nan), guarded(hot))),
        "latents in fp32": error_of(lambda: run(lambda vae: vae.decode(nan), guarded(single))),
        "replaced": error_of(lambda: guarded(replaced)),
        "empty": error_of(lambda: guarded(empty)),
    }
