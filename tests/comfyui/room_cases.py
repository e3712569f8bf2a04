"""What ComfyUI's manager does with the room that a call asks for: on a card of so many bytes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_cases import import_ours

WIDTH, HEIGHT, FRAMES = 96, 64, 9
PARTS = (1.5, 0.8, 0.5, 0.3, 0.05)


def case_survived() -> dict[str, Any]:
    """Memory runs out once within a step: whether all of the denoiser was on the card at each of its calls, whether the
    latents are as without, and what the report says."""
    import_ours()
    import moving
    import torch
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from small_families import BUILDERS

    with tempfile.TemporaryDirectory() as folder:
        handle = moving.opened(BUILDERS["2b"](Path(folder) / "2b"), "none", host.placement())
        positive, negative = encode_prompts(handle, ["a kite", "grey"])[0]
        settings = SampleSettings(32, 32, steps=2, seed=1, frames=5, guidance_scale=5.0)
        expected, _ = sample(handle, positive, negative, settings)
        transformer = handle.store.components["transformer"].module
        size = moving.there(transformer)
        there: list[bool] = []

        def called(*_: Any) -> None:
            there.append(moving.there(transformer) == size)
            if len(there) == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        transformer.transformer_blocks[1].register_forward_pre_hook(called)
        latents, report = sample(handle, positive, negative, settings)
        said = [note for note in report.notes if "memory ran out" in note]
        return {"there": there, "same": torch.equal(latents, expected), "said": said}


def case_asked() -> dict[str, Any]:
    """{what there is room for: (whether the VAE was on the card while the denoiser computed, how often weights came
    there in the second of two runs)}"""
    import_ours()
    import moving
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from PIL import Image
    from second_device import card
    from small_families import BUILDERS

    management: Any = sys.modules["comfy.model_management"]
    management.minimum_inference_memory = management.extra_reserved_memory = lambda: 0  # the card is a small one
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = BUILDERS["5b-i2v"](Path(folder) / "5b-i2v")
        handle = moving.opened(model, "none", host.placement())
        positive, negative = encode_prompts(handle, ["a kite", "grey"])[0]
        settings = SampleSettings(WIDTH, HEIGHT, steps=2, seed=1, frames=FRAMES, guidance_scale=5.0)

        def run() -> None:
            sample(handle, positive, negative, settings, image=Image.new("RGB", (WIDTH, HEIGHT), "grey"))

        run()
        beside = max(bytes_ for key, bytes_ in handle.store.room.items() if key[0] == "transformer")
        vae, transformer = handle.store.components["vae"].module, handle.store.components["transformer"].module
        weights, total, moves = moving.there(vae, transformer), card.total(), moving.Moves()
        there: list[bool] = []
        transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: there.append(moving.there(vae) > 0))
        for case, more in {"weights alone": 0.5, "weights and the call": 2.5}.items():
            management.unload_all_models()
            card.set_total(int(1.1 * weights + more * beside))  # the manager takes weights for a tenth more
            del there[:]
            run()
            before = moves.n
            run()
            found[case] = [any(there), moves.n - before]
        card.set_total(total)
        moves.end()
    return found


def case_auto() -> dict[str, Any]:
    """{model, part of what its run takes: (ways that offload 'auto' chose, or why it refused, how far the frames are
    from the right ones, whether memory ran out)}"""
    import_ours()
    import moving
    from comfyui_onediff_guard.comfyui_host import host
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.weights.oom_fallback import NoRoom
    from second_device import card
    from small_families import BUILDERS
    from small_runs import SIZES, sampled
    from small_wan import build_wan

    management: Any = sys.modules["comfy.model_management"]
    management.minimum_inference_memory = management.extra_reserved_memory = lambda: 0  # the card is a small one
    found: dict[str, Any] = {}
    total = card.total()
    with tempfile.TemporaryDirectory() as folder:

        def run() -> tuple[Any, list[str]]:
            handle.store.prompts.clear()
            latents, sampling = sampled(handle, model)
            frames, decoding = decode(handle, latents)
            return frames.cpu(), [note for each in (sampling, *sampling.before, decoding) for note in each.notes]

        for model in SIZES:
            path = {**BUILDERS, "wan": build_wan}[model](Path(folder) / model)
            handle = moving.opened(path, "auto", host.placement())
            expected, _ = run()
            management.unload_all_models()
            card.reset_most_used()
            run()
            most = card.most_used()
            for part in PARTS:
                management.unload_all_models()
                card.set_total(int(part * most))
                try:
                    frames, notes = run()
                except NoRoom as error:
                    found[f"{model}, {part}"] = [[str(error)], 0, False]
                    continue
                finally:
                    card.set_total(total)
                off = ((frames - expected).norm() / expected.norm()).item()
                chose = [note.partition("chose ")[2].partition(":")[0] for note in notes if "auto chose" in note]
                found[f"{model}, {part}"] = [chose, off, any("memory ran out" in note for note in notes)]
    return found
