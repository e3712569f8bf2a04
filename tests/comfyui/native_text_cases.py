"""Text that ComfyUI's MiniMax H3 and LTX-2 refine themselves, before they sample: run in ComfyUI's interpreter, judged
in test_native_text.py."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from native_in_comfyui import error_of, node, said
from native_models import SUPPORTED, Layout, in_fp32, make_model, prompts
from native_probe_cases import facts, probed

KINDS = import_module("comfy.patcher_extension").WrappersMP
TRUNK = {"ltx2": "transformer_blocks.0.ff.net.0.proj.weight", "minimax_h3": "blocks.0.mlp.fc1.weight"}
SOUND = {"ltx2": (1, 8, 6, 16), "minimax_h3": (1, 32, 2, 8)}
LAYOUTS = {
    "ltx2": Layout(
        "LTXAV",
        {
            "image_model": "ltxav",
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "cross_attention_dim": 48,
            "caption_channels": 32,
            "num_layers": 2,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 12,
            "audio_cross_attention_dim": 24,
            "connector_attention_head_dim": 16,
            "connector_num_attention_heads": 2,
            "connector_num_layers": 1,
        },
        latents=(1, 128, 2, 4, 4),
        context=(1, 7, 32),
        hot={"video_embeddings_connector.transformer_1d_blocks.0.ff.net.0.proj.weight": 6e4},
    ),
    "minimax_h3": Layout(
        "MiniMaxH3",
        {
            "image_model": "minimax_h3",
            "hidden_size": 48,
            "num_layers": 2,
            "token_refiner_num_layers": 1,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "ffn_hidden_size": 64,
            "latents_dim": 24,
            "audio_latents_dim": 32,
            "text_dim": 40,
            "timestep_input_dim": 32,
            "time_embed_hidden_size": 48,
            "time_embed_dim": 24,
            "rope_inv_freq_len": 4,  # × 3 axes × 2: 24 of a head's 32
        },
        latents=(1, 24, 2, 4, 4),
        context=(1, 7, 40),
        hot={"token_refiner.blocks.0.mlp.fc1.weight": 3e4},
        cfg=1.0,  # it takes one prompt at a time
    ),
}
LAYOUTS = {name: layout for name, layout in LAYOUTS.items() if hasattr(SUPPORTED, layout.config)}


def hot(name: str, *, refiner: bool, trunk: bool) -> Any:
    patcher = make_model(LAYOUTS[name], hot=refiner)
    if trunk:
        patcher.model.diffusion_model.get_parameter(TRUNK[name]).mul_(3e4)
    return patcher


def empty(name: str) -> Any:
    """Latents of pictures and sound."""
    streams = [torch.zeros(shape) for shape in (LAYOUTS[name].latents, SOUND[name])]
    return import_module("comfy.nested_tensor").NestedTensor(streams)


def sample(name: str, patcher: Any) -> torch.Tensor:
    """Pictures and sound, behind one another."""
    layout, generator = LAYOUTS[name], torch.Generator().manual_seed(5)
    start = empty(name)
    noise = type(start)([torch.randn(stream.shape, generator=generator) for stream in start.unbind()])
    positive, negative = prompts(layout)
    with torch.inference_mode():
        made = import_module("comfy.sample").sample(
            patcher, noise, 3, layout.cfg, "euler", "simple", positive, negative, start, seed=1, disable_pbar=True
        )
    return torch.cat([stream.flatten() for stream in made.unbind()])


def sampled(name: str, patcher: Any) -> Mapping[str, torch.Tensor]:
    """With the text that the network was given."""
    given: list[torch.Tensor] = []

    def look(executor: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        given.append(args[1].float())  # after c_concat
        return executor(x, t, *args, **kwargs)

    clone = patcher.clone()
    clone.add_wrapper_with_key(KINDS.APPLY_MODEL, "test", look)
    made = sample(name, clone)
    return {"made": made, "text": given[0]}


def guarded(patcher: Any, **policy: Any) -> Any:
    return node("model", patcher, **policy)


def case_families() -> dict[str, Any]:
    return {"found": list(LAYOUTS)}


def case_refining() -> dict[str, Any]:
    """Models whose refiner overflows, with and without layers behind it that do, and healthy ones."""
    results: dict[str, Any] = {}
    for name in LAYOUTS:
        for which, refiner, trunk in (("text", True, False), ("both", True, True), ("none", False, False)):
            patcher = hot(name, refiner=refiner, trunk=trunk)
            before = set(vars(patcher.model))
            for kind, model in {
                "fp32": in_fp32(patcher, LAYOUTS[name]),
                "plain": patcher,
                "guarded": guarded(patcher),
            }.items():
                said.clear()
                found = sampled(name, model)
                results |= {f"{name}, {which}, {kind}, {key}": value for key, value in found.items()}
            results[f"{name}, {which}, said"] = list(said)
            results[f"{name}, {which}, left"] = sorted(set(vars(patcher.model)) - before)
            results[f"{name}, {which}, own method"] = "extra_conds" not in vars(patcher.model)
    return results


def case_probe() -> dict[str, Any]:
    """It measures what the model is given, which has to be finite."""
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        patcher = hot(name, refiner=True, trunk=False)
        results[name] = facts(probed(patcher, layout, latent_image={"samples": empty(name)}))["dtype"]
    return results


def case_refused() -> dict[str, Any]:
    """What a rerun cannot help, or may not."""
    results: dict[str, Any] = {}
    for name in LAYOUTS:
        patcher = hot(name, refiner=True, trunk=False)
        results[f"{name}, stop"] = error_of(lambda: sample(name, guarded(patcher, on_failure="stop")))  # noqa: B023
        broken = hot(name, refiner=False, trunk=False)
        (weight,) = LAYOUTS[name].hot
        broken.model.diffusion_model.get_parameter(weight)[0, 0] = torch.nan
        results[f"{name}, broken weight"] = error_of(lambda: sample(name, guarded(broken)))  # noqa: B023
        results[f"{name}, off"] = bool(sample(name, guarded(patcher, on_failure="off")).isfinite().all())
    return results
