"""What the probe finds in a MODEL: run in ComfyUI's interpreter, judged in test_native_probe.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import NODE_ID, error_of, node, on, pack_node, said
from native_models import CARD, LAYOUTS, Layout, in_fp32, make_model, prompts, sample

SD15 = LAYOUTS["sd15"]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def probed(patcher: Any, layout: Layout, **given: Any) -> dict[str, Any]:
    positive, negative = prompts(layout)
    wired = {"model": patcher, "positive": positive, "negative": negative, "node_id": NODE_ID}
    settings = {"steps": 3, "cfg": layout.cfg, "sampler_name": "euler", "scheduler": layout.scheduler, "seed": 1}
    latent = {"samples": torch.zeros(layout.latents)}
    with torch.inference_mode():
        return pack_node("NumericsProbeModel", **wired | {"latent_image": latent} | settings | given)


def facts(shown: dict[str, Any]) -> dict[str, Any]:
    return shown["ui"]["onediff_guard"][0]


def case_overflowing() -> dict[str, Any]:
    """Probed, and the recommendation applied: on a CPU with bf16, whatever this one has."""
    with on("cpu" if CARD.type == "cpu" else "sm86"):
        return _overflowing()


def _overflowing() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in ("sd15", "sdxl", "svd", "flux", "wan"):
        layout = LAYOUTS[name]
        patcher = make_model(layout, hot=True)
        said.clear()
        shown = probed(patcher, layout)
        results[f"{name}, told on the node"] = list(said)
        results[f"{name}, picture"], results[f"{name}, text"], results[f"{name}, profile"] = shown["result"]
        results[f"{name}, facts"] = facts(shown)
        for precision in (facts(shown)["dtype"], "fp16"):
            said.clear()
            results[f"{name}, {precision}"] = sample(node("model", patcher, precision=precision), layout)
            results[f"{name}, {precision} said"] = list(said)
        with on("sm75"):
            shown = probed(patcher, layout)
            results[f"{name}, text on sm75"], profile = shown["result"][1:]
            said.clear()
            results[f"{name}, profiled"] = sample(node("model", patcher, scope="learned", profile=profile), layout)
            results[f"{name}, profiled said"] = list(said)
        said.clear()
        sample(node("model", patcher, scope="learned", profile=profile), layout)
        results[f"{name}, profiled elsewhere said"] = list(said)
        results[f"{name}, reached"] = _reached(in_fp32(patcher, layout), layout, *layout.hot)
    return results


def _reached(patcher: Any, layout: Layout, weight: str) -> float:
    """The largest that the layer of a weight puts out, in a run without the probe and by a hook of its own."""
    reached: list[float] = []
    layer = patcher.model.diffusion_model.get_submodule(weight.removesuffix(".weight"))
    hook = layer.register_forward_hook(lambda _layer, _given, made: reached.append(made.abs().max().item()))
    positive, negative = prompts(layout)
    noise = import_module("comfy.sample").prepare_noise(torch.zeros(layout.latents), 1)
    given = (patcher, noise, 3, layout.cfg, "euler", layout.scheduler, positive, negative, torch.zeros(layout.latents))
    with torch.inference_mode():
        import_module("comfy.sample").sample(*given, seed=1, disable_pbar=True)
    hook.remove()
    return max(reached)


def case_healthy() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, dtypes in {
        "fp16": (torch.float16, None),
        "bf16": (torch.bfloat16, None),
        "fp32": (torch.float32, None),
        "fp32 computed in fp16": (torch.float32, torch.float16),
        "fp8 computed in bf16": (torch.float8_e4m3fn, torch.bfloat16),
    }.items():
        results[name] = facts(probed(make_model(SD15, *dtypes), SD15))
    return results


def case_empty_latents() -> dict[str, Any]:
    """What the model is given where a latent is empty and of another model's ratios, by the probe and by KSampler."""
    results: dict[str, Any] = {}
    ksampler = import_module("nodes").KSampler
    kind = import_module("comfy.patcher_extension").WrappersMP.APPLY_MODEL
    for name, latent in {
        "sd15": {"samples": torch.zeros(1, 64, 4, 4), "downscale_ratio_spacial": 16},
        "wan": {"samples": torch.zeros(1, 16, 1, 4, 4), "downscale_ratio_spacial": 16, "downscale_ratio_temporal": 8},
    }.items():
        layout, shapes = LAYOUTS[name], list[tuple[int, ...]]()

        def look(executor: Any, x: torch.Tensor, *args: Any, _shapes: Any = shapes, **kwargs: Any) -> Any:
            _shapes.append(tuple(x.shape))
            return executor(x, *args, **kwargs)

        patcher = make_model(layout).clone()
        patcher.add_wrapper_with_key(kind, "test", look)
        picture = probed(patcher, layout, latent_image=latent)
        results[f"{name}, probed"] = sorted(set(shapes))
        shapes.clear()
        positive, negative = prompts(layout)
        with torch.inference_mode():
            made = ksampler().sample(patcher, 1, 3, layout.cfg, "euler", layout.scheduler, positive, negative, latent)
        results[f"{name}, sampled"] = sorted(set(shapes))
        results[f"{name}, made"] = list(made[0]["samples"].shape)
        results[f"{name}, worst"] = facts(picture)["worst"][0]["reach"]
    return results


def case_leaves_nothing() -> dict[str, Any]:
    """The MODEL that was probed, guarded before, and what is behind it."""
    patcher = make_model(SD15)
    before, guarded = sample(patcher, SD15), node("model", patcher)
    said.clear()
    shown = facts(probed(guarded, SD15))
    told = list(said)
    said.clear()
    return {
        "same": torch.equal(before, sample(patcher, SD15)) and torch.equal(before, sample(guarded, SD15)),
        "guarded said": list(said),
        "told": told,
        "worst": shown["worst"],
        "unguarded worst": facts(probed(patcher, SD15))["worst"],
        "hooks": sum(len(layer._forward_hooks) for layer in patcher.model.modules()),
    }


def case_hopeless() -> dict[str, Any]:
    broken = make_model(SD15)
    broken.model.diffusion_model.input_blocks[1][0].in_layers[2].weight[0, 0] = torch.inf
    nan = {"samples": torch.full(SD15.latents, torch.nan)}
    return {
        "weight": error_of(lambda: probed(broken, SD15)),
        "latents": error_of(lambda: probed(make_model(SD15), SD15, latent_image=nan)),
        "double": error_of(lambda: probed(make_model(SD15, torch.float64), SD15)),
        "afterwards": facts(probed(make_model(SD15), SD15))["dtype"],
    }
