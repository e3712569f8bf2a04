"""Runs over several ranks (processes that compute together over gloo): for tests, and the code that runs in each rank.

A spawned process imports this file by its plain name, so the code it runs must be here.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

SECONDS = 1500  # timeout for all processes of a test; on an idle machine none takes a tenth of it
SIZES = {
    "2b": (96, 64, 9),
    "5b": (96, 80, 9),
    "1.5": (96, 64, 9),
    "5b-i2v": (96, 64, 9),
    "cogview3": (96, 64, 1),
    "cogview4": (96, 64, 1),
    "wan": (64, 48, 9),
    "wan-ti2v": (64, 64, 9),
    "wan-two": (64, 48, 9),
    "svd": (128, 128, 5),  # if smaller, the deepest level normalises single values: rounding errors grow 300 times
}


@dataclass(frozen=True)
class Fault:
    """A fault in a layer's half-precision output, in some ranks, at one call of the layer."""

    layer: str
    ranks: tuple[int, ...]
    call: int
    value: float
    place: float | None = None  # position of the replaced value in the output, 0..1; None: all values
    component: str = ""  # of the layer; "": the denoiser


@dataclass(frozen=True)
class Case:
    """One sampling run of a model."""

    model: str
    folder: Path
    precision: str = "fp32"
    backend: str = "eager"
    steps: int = 2
    fault: Fault | None = None
    size: tuple[int, int, int] | None = None  # width, height, frames; None: from SIZES
    cache: bool = False  # use a step cache
    chunk: int = 0  # frames decoded at once; 0: no decoding
    offload: str = "none"
    lora: Path | None = None
    guidance: float = 5.0  # above 1 SVD uses its own

    def __str__(self) -> str:
        return f"{self.model} {self.precision} {self.backend}"


@dataclass
class Made:
    """The result of a case in one process."""

    latents: torch.Tensor
    steps: list[tuple[str, str, str]]  # dtype, outcome and note of each call
    learned: Any
    happened: bool  # whether the fault occurred in this process
    batch: int  # batch size of a call in this process
    tokens: int  # tokens per sample in this process
    notes: list[str] = field(default_factory=list)
    cached: list[bool] = field(default_factory=list)  # for each call
    frames: torch.Tensor | None = None
    decoding: list[tuple[str, str, str]] = field(default_factory=list)  # dtype, outcome and note of each part
    backend: str = ""  # with the reason and the attention kernel


def sampled(case: Case) -> Made:
    """Run a case in this process, alone or as one rank."""
    from weights_apart import simulated_offload

    with simulated_offload() if case.offload in ("group", "sequential") else nullcontext():
        return _sampled(case)


def _sampled(case: Case) -> Made:
    from comfyui_onediff_guard.pipelines.models.lora import Lora
    from comfyui_onediff_guard.pipelines.parallel.group import process_group
    from comfyui_onediff_guard.pipelines.run.decode import decode
    from comfyui_onediff_guard.pipelines.run.encode import encode_prompts
    from comfyui_onediff_guard.pipelines.run.handle import add_lora
    from comfyui_onediff_guard.pipelines.run.pictures import fitted
    from comfyui_onediff_guard.pipelines.run.sample import SampleSettings, sample
    from comfyui_onediff_guard.pipelines.weights import components
    from comfyui_onediff_guard.precision.error_estimate import CachePolicy
    from comfyui_onediff_guard.precision.policy import Component
    from small_runs import opened

    components._STORES.clear()
    handle = opened(case.folder, case.offload, case.precision, backend=case.backend, ranks=process_group())
    handle = replace(handle, step_cache=CachePolicy(error=0.5, check_every=3)) if case.cache else handle
    handle = add_lora(handle, Lora(case.lora)) if case.lora else handle
    width, height, frames = case.size or SIZES[case.model]
    positive, negative, guidance, start = None, None, None if case.guidance > 1 else case.guidance, {}
    with torch.inference_mode():
        if handle.family.prompt:
            (positive, negative), _ = encode_prompts(handle, ["a red kite over the sea", "grey"])
            guidance = case.guidance
        if handle.family.takes_image:
            image = torch.rand(1, height, width, 3, generator=torch.Generator().manual_seed(2))
            start = {"image": fitted(image, width, height, "crop")[0]}
        settings = SampleSettings(width, height, case.steps, seed=3, frames=frames, guidance_scale=guidance)
        happened: list[bool] = []
        counts: list[tuple[int, int]] = []
        _count(handle, counts)
        if case.fault and process_group().rank in case.fault.ranks:
            component = case.fault.component or handle.family.denoiser
            part = Component.VAE_DECODE if component == "vae" else Component.DENOISER
            network = handle.store.module(component, handle.plan(part).dtype)
            _break(network.get_submodule(case.fault.layer), case.fault, happened)
        latents, report = sample(handle, positive, negative, settings, **start)
        frames, decoding = decode(handle, latents, chunk=case.chunk) if case.chunk else (None, None)
    cached = [step.cached for step in report.steps]
    notes = [*report.notes, *(decoding.notes if decoding else ())]
    told, of_frames = _told(report), _told(decoding) if decoding else []
    why = report.backend_reason
    return Made(latents, told, report.learned, bool(happened), *counts[0], notes, cached, frames, of_frames, why)


def _told(report: Any) -> list[tuple[str, str, str]]:
    return [(step.dtype, step.outcome, step.note) for step in report.steps]


def _count(handle: Any, counts: list[tuple[int, int]]) -> None:
    """Record batch size and tokens of the denoiser's last layer. A UNet has frames in its batch."""

    def hook(_layer: object, given: Any, _made: object) -> None:
        counts.append(given[0].shape[:2])

    context = handle.family.context
    network = handle.store.module(handle.family.denoiser, handle.denoising()[0].plan.dtype)
    network.get_submodule("proj_out" if context else "conv_out").register_forward_hook(hook)


def _break(layer: torch.nn.Module, fault: Fault, happened: list[bool]) -> None:
    calls = iter(range(10**6))

    def hook(_layer: object, _given: object, made: Any) -> Any:
        if not isinstance(made, torch.Tensor) or made.itemsize != 2 or next(calls) != fault.call or not made.numel():
            return made
        happened.append(True)
        with torch._C.DisableTorchFunction():  # hidden from function modes, or this rank alone would leave its plan
            made = made.clone(memory_format=torch.contiguous_format)
            flat = made.view(-1)
            if fault.place is None:
                return made.fill_(fault.value)
            flat[int(fault.place * (len(flat) - 1))] = fault.value
            return made

    layer.register_forward_hook(hook)


def run_cases(cases: Sequence[Case]) -> list[Made]:
    return [sampled(case) for case in cases]


def run_in_ranks(size: int, run: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `run(*arguments)` in `size` processes of one group. Returns the result of each; fails with their errors."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = [Path(folder) / f"answer{number}" for number in range(size)]
        given = (size, Path(folder) / "meeting", run, arguments)
        started = [context.Process(target=_rank, args=(n, *given, answers[n])) for n in range(size)]
        for process in started:
            process.start()
        try:
            for process in started:
                process.join(SECONDS)
        finally:
            for process in started:
                if process.is_alive():
                    process.kill()
                process.join()
        found = [torch.load(answer, weights_only=False) if answer.exists() else "no answer" for answer in answers]
    broken = [f"rank {number}: {answer}" for number, answer in enumerate(found) if isinstance(answer, str)]
    assert not broken, "\n".join(broken)
    return [answer[0] for answer in found]


def _rank(
    number: int, size: int, meeting: Path, run: Callable[..., Any], arguments: tuple[Any, ...], answer: Path
) -> None:
    import traceback

    from comfyui_onediff_guard.pipelines.parallel.group import joined

    torch.set_num_threads(1)
    try:
        with joined(number, size, meeting, cuda=False):
            torch.save((run(*arguments),), answer)
            torch.distributed.barrier()
    except BaseException:  # noqa: BLE001 - the test shows it
        torch.save(traceback.format_exc(), answer)
