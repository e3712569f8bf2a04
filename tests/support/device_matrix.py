"""Runs every family on a device, in each precision and offload mode.

    python tests/support/device_matrix.py DEVICE RESULT [MODEL …]

RESULT is a JSON file: by "model/overflow/leg", the error of latents and frames against a run on the CPU, and the
report's counts. DEVICE "cuda" is a GPU, run by hand; the CPU's run is in fp32. "second" is the second device
(second_device/); the CPU's run is the same one. Its kernels are the CPU's, so results must be equal if
MKL_CBWR=COMPATIBLE is set.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

MODELS = ("2b", "5b-i2v", "1.5", "cogview3", "cogview4", "svd", "wan", "wan-ti2v", "wan-two")
SIZES = {
    "1.5": (96, 64, 9),
    "5b-i2v": (96, 64, 9),
    "cogview3": (128, 128, 1),
    "cogview4": (128, 128, 1),
    "svd": (128, 128, 4),
}
SIZES |= {"wan": (96, 96, 5), "wan-ti2v": (96, 96, 5), "wan-two": (96, 96, 5)}
SMALL_SIZES = dict.fromkeys(SIZES, (64, 64, 5)) | {
    "5b-i2v": (96, 64, 9),
    "svd": (64, 64, 2),
    "cogview3": (64, 64, 1),
    "cogview4": (64, 64, 1),
}
OVERFLOWS = dict.fromkeys(MODELS, ("none", "stream", "inside"))  # overflows that a model's folder can have
OVERFLOWS |= {"svd": ("none",)} | dict.fromkeys(("wan", "wan-ti2v", "wan-two"), ("none", "stream"))
_LORAS = tempfile.TemporaryDirectory()  # not in the models' folder, which other tests share


@dataclass(frozen=True)
class Leg:
    """One way to run a model."""

    name: str
    precision: str
    offload: str = "none"
    backend: str = "eager"
    scope: str = "step"
    exact_fp32: bool = False
    runs: int = 1  # of one handle: later runs reuse its state
    steps: int = 4
    sizes: str = "usual"
    step_cache: bool = False
    tiling: bool = False
    chunk: int = 0
    lora: bool = False
    video: bool = False  # video to video


LEGS = (
    Leg("fp16", "fp16", runs=2),
    Leg("bf16", "bf16"),
    Leg("fp32", "fp32", exact_fp32=True),
    Leg("auto", "auto", offload="auto"),
    Leg("learned", "fp16", scope="learned", runs=2),
    Leg("model", "fp16", offload="model", runs=2),
    Leg("group", "fp16", offload="group", runs=2),
    Leg("sequential", "fp16", offload="sequential", runs=2),
    Leg("fp32 in groups", "fp32", offload="group", exact_fp32=True, runs=2),
    Leg("step cache", "fp16", step_cache=True, runs=2),
    Leg("tiled", "fp16", tiling=True),
    Leg("chunked", "fp16", chunk=1),
)
_LEARNED = Leg("learned", "fp16", offload="group", scope="learned")
_STEP_CACHE = Leg("step cache", "fp16", step_cache=True, steps=10)
_AUTO, _GROUP = Leg("auto", "fp32", offload="auto"), Leg("group", "fp32", offload="group")
# Every family in fp32 with offload 'auto' and with overflow in fp16; each other mode once or twice
SECOND = {
    model: tuple(replace(leg, runs=2, sizes="small", steps=max(leg.steps - 2, 2)) for leg in (_AUTO, _LEARNED, *others))
    for model, others in {
        "2b": (
            _GROUP,
            Leg("LoRA", "fp16", offload="group", lora=True),
            Leg("bf16", "bf16"),
            Leg("from a video", "fp16", offload="sequential", video=True, steps=5),
        ),
        "5b-i2v": (Leg("tiled", "fp32", offload="sequential", tiling=True),),
        "1.5": (Leg("model", "fp32", offload="model"),),
        "cogview3": (_GROUP, Leg("bf16", "bf16", offload="sequential")),
        "cogview4": (Leg("LoRA", "fp32", offload="sequential", lora=True), replace(_STEP_CACHE, offload="group")),
        "svd": (),
        "wan": (Leg("sequential", "fp16", offload="sequential"), Leg("chunked", "fp32", chunk=1)),
        "wan-ti2v": (Leg("int8", "int8", offload="model"), Leg("tiled", "fp32", tiling=True)),
        "wan-two": (Leg("model", "fp32", offload="model"), Leg("LoRA", "fp16", offload="sequential", lora=True)),
    }.items()
}
COMPILED = (
    Leg("inductor", "fp16", backend="inductor", runs=2),
    Leg("inductor learned", "fp16", backend="inductor", scope="learned", runs=3),
    Leg("inductor in groups", "fp16", backend="inductor", offload="group", runs=2),
)


def ran(folder: Path, device: torch.device, leg: Leg) -> Iterator[tuple[torch.Tensor, torch.Tensor, Any, Any]]:
    """Yield latents, frames, and the reports of sampling and decoding, for each run of a leg."""
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.handle import add_lora
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.precision.error_estimate import CachePolicy
    from comfyui_onediff_guard.precision.guard import GuardPolicy, Scope
    from small_runs import opened, picture

    handle = opened(folder, leg.offload, leg.precision, device=device, backend=leg.backend)
    policy = GuardPolicy(scope=Scope(leg.scope), exact_fp32=leg.exact_fp32)
    handle = replace(handle, policy=policy, step_cache=CachePolicy(0.1) if leg.step_cache else None)
    if leg.lora:
        handle = add_lora(handle, lora_for(folder))
    sizes, usual = (SIZES, (128, 96, 9)) if leg.sizes == "usual" else (SMALL_SIZES, (64, 48, 5))
    width, height, frames = sizes.get(folder.name.rpartition("-")[0], usual)
    settings = SampleSettings(width, height, steps=leg.steps, seed=3, frames=frames, guidance_scale=5.0)
    settings = replace(settings, strength=0.8) if leg.video else settings
    for number in range(leg.runs):
        handle.store.prompts.clear()
        prompts = ["a red kite", "grey"] if number == 0 else ["a blue kite over the sea", "grey"]
        positive, negative = encode_prompts(handle, prompts)[0] if handle.family.prompt else (None, None)
        image = picture(width, height, seed=2 + number)
        start: dict[str, Any] = {"image": image} if handle.family.takes_image else {}
        start |= {"video": [image.rotate(9 * n) for n in range(frames)]} if leg.video else {}
        latents, sampled = sample(handle, positive, negative, settings, **start)
        made, decoded = decode(handle, latents, tiling=leg.tiling, chunk=leg.chunk)
        assert latents.device.type == made.device.type == "cpu", "ComfyUI expects node outputs on the CPU"
        yield latents.cpu().float(), made.cpu().float(), sampled, decoded
        del positive, negative, latents, made
    if device.type == "cuda":
        left = {
            str(each.device) for component in handle.store.components.values() for each in component.module.parameters()
        }
        assert leg.offload in ("none", "auto") or left <= {"cpu", "meta"}, f"left on {left} with {leg.offload}"


@functools.cache
def lora_for(model: Path) -> Any:
    from trained_lora import train_lora

    return train_lora(Path(tempfile.mkdtemp(dir=_LORAS.name)), model)


def off(made: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative error by norm; infinite for a result that is not finite."""
    error = float((made.double() - exact.double()).norm() / exact.double().norm())
    return error if math.isfinite(error) else math.inf


@contextlib.contextmanager
def computed_as_on_a_card() -> Iterator[None]:
    """Make the CPU compute like a card in two places. Group norms: only on a CPU PyTorch's `at::native::group_norm`
    keeps channels last, with another order of summation. Scaled products: only on a CPU are values that fp16 does not
    resolve recomputed in float32."""
    from comfyui_onediff_guard.precision import scaled_products

    own = torch.nn.functional.group_norm

    def contiguous(given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return own(given.contiguous(), *args, **kwargs)

    with (
        mock.patch.object(torch.nn.functional, "group_norm", contiguous),
        mock.patch.object(scaled_products, "_is_on_host", return_value=False),
    ):
        yield


def rows(
    folder: Path, device: torch.device, legs: tuple[Leg, ...], *, same: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """same: the CPU's run is in the leg's precision, not in fp32."""

    @functools.cache
    def on_cpu(leg: Leg) -> list[Any]:
        with computed_as_on_a_card() if same else contextlib.nullcontext():
            return [made[:2] for made in ran(folder, torch.device("cpu"), leg)]

    def reference(leg: Leg) -> list[Any]:
        if same and leg.precision == "int8":  # not every CPU supports it
            return [made[:2] for made in ran(folder, device, replace(leg, offload="none"))]
        if same:
            return on_cpu(replace(leg, name="", offload="none"))
        plain = Leg("", "fp32", exact_fp32=True, runs=max(leg.runs, 2), tiling=leg.tiling, chunk=leg.chunk)
        return on_cpu(replace(plain, steps=leg.steps, sizes=leg.sizes))

    for leg in legs:
        since = time.perf_counter()
        found: dict[str, Any] = {"runs": []}
        try:
            for (latents, frames, sampled, decoded), (right, right_frames) in zip(
                ran(folder, device, leg), reference(leg), strict=False
            ):
                found["runs"].append(
                    {
                        "latents": off(latents, right),
                        "frames": off(frames, right_frames),
                        "plan": sampled.plan.dtype,
                        "reruns": sampled.reruns + decoded.reruns,
                        "backend": sampled.backend,
                        "cached": sum(step.cached for step in sampled.steps),
                    }
                )
        except Exception:  # noqa: BLE001 - shown
            found["error"] = traceback.format_exc()[-3000:]
        found["seconds"] = round(time.perf_counter() - since, 2)
        if same:
            import second_device
            from comfyui_onediff_guard.precision.scaled_products import scalar

            scalar.cache_clear()  # cached scalars of 4 bytes
            gc.collect()
            found |= {"hazards": second_device.hazards(), "left": second_device.card.used()}
            second_device.card.reset()
        yield leg.name, found


def _overflow_for(leg: Leg, model: str) -> str:
    return OVERFLOWS[model][-1 if leg.precision == "fp16" and not leg.step_cache else 0]


def main(device: torch.device, result: Path, models: list[str], *, second: bool) -> None:
    import shared_models

    usual = COMPILED if os.environ.get("COMPILED") else LEGS
    found = {}
    for name in models or MODELS:
        for overflow in OVERFLOWS[name]:
            folder = shared_models.model_folder(name, overflow)
            chosen = tuple(leg for leg in SECOND[name] if overflow == _overflow_for(leg, name)) if second else usual
            for leg, row in rows(folder, device, chosen, same=second):
                found[f"{name}/{overflow}/{leg}"] = row
                runs = "  ".join(
                    f"{run['plan']} {run['backend']} {run['latents']:.1e} {run['frames']:.1e} reruns {run['reruns']}"
                    for run in row["runs"]
                )
                error = row.get("error", "").strip().rpartition("\n")[2][:160]
                print(f"{name}/{overflow}/{leg}: {runs} {error} ({row['seconds']} s)", flush=True)
                result.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    second = sys.argv[1] == "second"
    if second:
        import second_device

        second_device.install()
    with tempfile.TemporaryDirectory() as shared:
        os.environ.setdefault("ONEDIFF_GUARD_SHARED_MODELS", shared)
        main(torch.device("cuda" if second else sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], second=second)
