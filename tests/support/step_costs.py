"""Costs of a sampling step on the second device: host waits, kernels, and copied bytes.

    python tests/support/step_costs.py MODEL

prints a JSON object: by mode, the costs of each step, and the bytes a second run copies. The costs of a step are the
difference between runs of six and of three steps. "diffusers" is diffusers' own pipeline, without this pack.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

STEPS = (3, 6)
FACTS = ("calls", "waits", "waits in the denoiser", "kernels", "bytes to the device", "bytes to the host")
SIZES = {"wan": (64, 64, 5), "wan-two": (64, 64, 5), "cogview3": (64, 64, 1), "cogview4": (64, 64, 1)}
ROOT = Path(__file__).parents[2].resolve()


class Costs:
    """Counts by name: "waits", "waits in the denoiser", its "calls", "kernels", "bytes to the host", …"""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.places: Counter[str] = Counter()  # places in this pack where the host waited
        self.inside = False  # whether the denoiser's forward runs

    def count_wait(self, what: str) -> None:
        self.found["waits"] += 1
        self.found["waits in the denoiser"] += self.inside
        stack = traceback.extract_stack()[:-1]
        ours = [frame for frame in stack if Path(frame.filename).is_relative_to(ROOT) and ".venv" not in frame.filename]
        here = ours[-1] if ours else stack[-1]
        self.places[f"{what} at {Path(here.filename).name}:{here.lineno}"] += 1

    @contextmanager
    def watching(self, card: Any, network: torch.nn.Module) -> Iterator[None]:
        """Count inside `with`. network: the denoiser."""
        kind, forward = type(network), type(network).forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.inside = True
            self.found["calls"] += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self.inside = False

        torch.cuda.synchronize()
        card.reset()
        card.set_on_wait(self.count_wait)
        kind.forward = watched
        try:
            yield
        finally:
            kind.forward = forward
            card.set_on_wait(None)
            self.found.update({name: card.counts()[name] for name in card.counts() if not name.startswith("waits")})


def ours(folder: Path, card: Any, *, step_cache: bool = False, **options: Any) -> Callable[[int], Costs]:
    """A function that runs this pack for a number of steps and returns the costs."""
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.precision.error_estimate import CachePolicy
    from small_runs import opened, prompts

    handle = replace(opened(folder, **options), step_cache=CachePolicy(0.1) if step_cache else None)
    positive, negative = prompts(handle)
    width, height, frames = SIZES.get(folder.name.rpartition("-")[0], (64, 48, 5))
    name = handle.family.denoisers[0]
    plan = handle.denoising()[0].plan

    def run(steps: int) -> Costs:
        costs = Costs()
        settings = SampleSettings(width, height, steps=steps, seed=3, frames=frames, guidance_scale=5.0)
        with costs.watching(card, handle.store.module(name, plan.dtype)):
            sample(handle, positive, negative, settings)
        return costs

    return run


def diffusers_own(folder: Path, card: Any, dtype: torch.dtype, *, group: bool = False) -> Callable[[int], Costs]:
    """The same for diffusers' own pipeline. group: with its own group offload."""
    from diffusers import DiffusionPipeline

    pipe: Any = DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype)
    if group:
        cuda, cpu = torch.device("cuda:0"), torch.device("cpu")
        stream = {"use_stream": True, "record_stream": True, "low_cpu_mem_usage": True}
        pipe.transformer.enable_group_offload(cuda, cpu, "block_level", num_blocks_per_group=1, **stream)
        pipe.text_encoder.to(cuda)
        pipe.vae.to(cuda)
    else:
        pipe.to("cuda")
    pipe.set_progress_bar_config(disable=True)
    width, height, frames = SIZES.get(folder.name.rpartition("-")[0], (64, 48, 5))
    several = {"num_frames": frames} if frames > 1 else {}
    with torch.no_grad():
        positive, negative = pipe.encode_prompt("a red kite", "grey", do_classifier_free_guidance=True)[:2]

    def run(steps: int) -> Costs:
        costs, seed = Costs(), torch.Generator().manual_seed(3)
        given = {"prompt_embeds": positive, "negative_prompt_embeds": negative, "generator": seed, **several}
        with costs.watching(card, pipe.transformer), torch.no_grad():
            pipe(
                height=height, width=width, num_inference_steps=steps, output_type="latent", guidance_scale=5.0, **given
            )
        return costs

    return run


WAYS: dict[str, Callable[[Path, Any], Callable[[int], Costs]]] = {
    "diffusers": lambda folder, card: diffusers_own(folder, card, torch.bfloat16),
    "guard": lambda folder, card: ours(folder, card, precision="bf16"),
    "step cache": lambda folder, card: ours(folder, card, precision="bf16", step_cache=True),
    "offload model": lambda folder, card: ours(folder, card, precision="bf16", offload="model"),
    "diffusers, offload group": lambda folder, card: diffusers_own(folder, card, torch.bfloat16, group=True),
    "offload group": lambda folder, card: ours(folder, card, precision="bf16", offload="group"),
    "diffusers in fp16": lambda folder, card: diffusers_own(folder, card, torch.float16),
    "guard and learned scales": lambda folder, card: ours(folder, card, precision="fp16"),
}


def main(model: str) -> None:
    import second_device
    import shared_models

    card = second_device.install()
    folder, found = shared_models.model_folder(model, "none"), {}
    for name, way in WAYS.items():
        run = way(folder, card)
        run(STEPS[0])  # reads the weights
        few, many = (run(steps) for steps in STEPS)
        n = STEPS[1] - STEPS[0]
        found[name] = {
            "a step": {fact: (many.found[fact] - few.found[fact]) / n for fact in FACTS},
            "a run": few.found,
            "places": many.places - few.places,
        }
        del run
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as shared:
        os.environ.setdefault("ONEDIFF_GUARD_SHARED_MODELS", shared)
        main(sys.argv[1])
