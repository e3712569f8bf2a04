"""Latents → frames or images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ...precision.guard import GuardPolicy, GuardStopped, OnFailure
from ...precision.layer_peaks import non_finite
from ...precision.policy import Component, Precision
from ...precision.report import RunReport
from ...trust.message import BadInput, Message
from ..compile import auto_compile
from ..compile.auto_compile import CallSignature, DecoderCompiler
from ..compile.backends import EAGER
from ..compile.compiled_blocks import while_compiling
from ..families.table import FAMILIES
from ..parallel.exchange import collected, dealt
from ..parallel.group import ALONE
from ..weights.placement import ExecutionOption, OomFallback
from .handle import PipelineHandle, in_turn
from .stage import Calls, CallTold, ComponentStage
from .vae import dry_run, guarded


class Portions(NamedTuple):
    """How much is decoded at once."""

    chunk: int  # so many frames or images; 0: all
    tiling: bool  # a tile of each
    slicing: bool  # one video of a batch

    def __str__(self) -> str:
        said = [*([f"{self.chunk} at once"] if self.chunk else []), *(["tiling"] if self.tiling else [])]
        return ", ".join(said) or "whole"

    def that_work(self, stage: ComponentStage) -> Portions:
        """Return the portions that the VAE supports. Each option that it lacks is a warning in the report."""
        can = {
            "chunk": stage.handle.family.layout.takes_chunks,
            "tiling": hasattr(stage.module, "tiled_decode"),
            "slicing": hasattr(stage.module, "use_slicing"),
        }
        idle = [name for name, value in self._asdict().items() if value and not can[name]]
        for name in idle:
            stage.report.warnings += (
                Message(
                    "'{}' has no effect: the VAE of {} does not support it. Set '{}' to save memory.",
                    name,
                    stage.handle.store.model.variant.name,
                    "chunk" if can["chunk"] else "tiling",
                ),
            )
        return self._replace(**dict.fromkeys(idle, 0))

    def smaller(self, stage: ComponentStage, latents: torch.Tensor) -> Iterator[Portions]:
        """Yield portions that take less memory, the largest first."""
        portions, layout = self, stage.handle.family.layout
        while layout.takes_chunks and (portions.chunk or len(latents)) > 1:
            portions = portions._replace(chunk=(portions.chunk or len(latents)) // 2)
            yield portions
        if not self.tiling and hasattr(stage.module, "tiled_decode"):
            yield portions._replace(tiling=True)

    def decode(self, stage: ComponentStage, vae: Any, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the decoded frames or images, float32 [n, 3, height, width] each."""
        vae.use_tiling, vae.use_slicing = self.tiling, self.slicing
        surplus = surplus_of(stage.handle, latents)

        def decoded(part: torch.Tensor, **more: Any) -> torch.Tensor:
            made = vae.decode(part, **more).sample.float()
            return made[:, :, surplus:] if surplus else made

        return stage.handle.family.layout.decoded(decoded, latents, self.chunk)

    def foreseen(self, stage: ComponentStage, latents: torch.Tensor) -> tuple[int, list[CallSignature]]:
        """Return the activation memory of decoding, in bytes, and the signature of each call of the decoder."""

        def run(vae: Any, given: torch.Tensor) -> None:
            for _ in self.decode(stage, vae, given):  # keeps nothing
                pass

        return dry_run(stage, "decoder", latents, run, self)


def ways_to_decode(
    stage: ComponentStage,
    latents: torch.Tensor,
    portions: Portions,
    take: Callable[[Portions], object] = lambda _: None,
) -> Iterator[ExecutionOption]:
    """Yield the options to decode latents: the requested portions, then those that take less memory. take: is called
    with an option's portions to use it."""
    for each in (portions, *portions.smaller(stage, latents)):
        yield ExecutionOption(str(each), stage.weights_at_once(), each.foreseen(stage, latents)[0], partial(take, each))


@in_turn
def decode(
    handle: PipelineHandle,
    latents: torch.Tensor,
    *,
    tiling: bool = False,  # decode in overlapping tiles: slower, with less memory
    slicing: bool = False,  # one video of a batch at a time: the same
    chunk: int = 0,  # frames or images decoded at once, where the VAE takes them apart (SVD, CogView); 0: all
    request: Precision | None = None,
    backend: str = "auto",  # "auto": the pipeline's own, where compiling pays; else one by its name
    made_by: str | None = None,  # the diffusers pipeline whose latents they are, where that is known
    progress: CallTold | None = None,  # called at each call of the decoder: one per tile and chunk of frames
) -> tuple[torch.Tensor, RunReport]:
    """Decode latents, in the family's layout, to [frames or images, height, width, 3] in 0..1, float32.

    Of several processes, all that decode in chunks share them: each gets all frames. What is decoded at once, each
    decodes for itself.
    Raises BadInput where the latents are not this model's, GuardStopped where they are not finite, both before a weight
    is read; GuardStopped where the result is not finite; BackendUnavailable where that backend does not work here.
    """
    stage = handle.stage(Component.VAE_DECODE, request)
    _check(handle, latents, made_by, policy=stage.policy)
    together = handle.family.layout.takes_chunks and 0 < chunk < len(latents)
    ranks = handle.ranks if together else ALONE  # the decode node's `TOGETHER` depends on `chunk` too
    if not ranks.alone:
        stage.report.note(f"chunks are decoded by {ranks.size} GPUs at the same time")
        stage = replace(stage, agree=ranks.all_reduce_absmax)
    if surplus := surplus_of(handle, latents):
        stage.report.note(
            Message("the first {} frames are cut: the VAE repeats the first of an even number of latents", surplus)
        )
    portions = Portions(chunk, tiling, slicing).that_work(stage)
    calls = Calls("decoding part {} of {}", progress or (lambda *_: None))
    compiler = DecoderCompiler(handle, stage.plan, stage.report, backend)
    vae = guarded(stage, "decoder", calls, compiler if compiler.backend.name != EAGER else None)

    def decoded() -> torch.Tensor:
        mine = latents if ranks.alone else dealt(latents, portions.chunk, ranks)
        takes, signatures = portions.foreseen(stage, mine)
        calls.done, calls.total = 0, len(signatures)
        stage.place(lambda: takes)
        on_device = mine.to(handle.store.placement.device)
        compiles_as, key = compiler.begin(signatures)
        before = len(stage.report.steps)
        with while_compiling(compiles_as, stage.report, calls.tell):
            pixels = torch.cat([part.cpu() for part in portions.decode(stage, vae, on_device)])
        if key:
            auto_compile.record(key, stage.report, stage.report.steps[before:])
        return pixels if ranks.alone else collected(pixels, portions.chunk, len(latents), ranks)

    def go_on(smaller: Portions) -> None:
        nonlocal portions
        portions = smaller

    try:
        with handle.switched(stage.report), torch.no_grad():
            pixels = OomFallback(stage, ranks).run(decoded, lambda: ways_to_decode(stage, latents, portions, go_on))
    finally:
        handle.finish("vae")
    return (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1), stage.report


def surplus_of(handle: PipelineHandle, latents: torch.Tensor) -> int:
    """Return the number of surplus frames that the VAE makes in front of each video."""
    return handle.family.layout.surplus(latents.shape[2], handle.store.model.vae_config)


def _check(handle: PipelineHandle, latents: torch.Tensor, made_by: str | None, policy: GuardPolicy) -> None:
    family, model = handle.family, handle.store.model
    channels = family.layout.channels(model.vae_config)
    wire = f"Wire them from a {family.name} sampler."
    if latents.ndim != family.layout.dimensions or latents.shape[1] != channels or not latents.numel():
        wanted = family.layout.shape.format(channels=channels)
        facts = tuple(latents.shape), model.variant.name, wanted, wire
        raise BadInput("The latents have shape {}, but {} decodes {}. {}", *facts)
    if made_by in FAMILIES and not FAMILIES[made_by].components.items() <= family.components.items():
        raise BadInput(
            "The latents were made by {}, but the pipeline is {}. {}", FAMILIES[made_by].name, model.variant.name, wire
        )
    broken = non_finite(latents)
    if broken and policy.on_failure is not OnFailure.OFF:
        raise GuardStopped(
            "There is nothing to decode: {} of the latents' {} values are NaN or infinite. Set the loader's "
            "precision to 'auto' and sample again. If no step fails then, choose another scheduler. If they came "
            "from a file, the file is damaged.",
            broken,
            latents.numel(),
        )
