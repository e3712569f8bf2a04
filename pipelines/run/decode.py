"""Latents → frames or images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...precision.guard import GuardPolicy, GuardStopped, OnFailure
from ...precision.observe import non_finite
from ...precision.policy import Component, Precision
from ...precision.report import RunReport
from ..errors import BadInput
from ..families.table import FAMILIES
from .calls import Calls, CallTold, calls_of_vae
from .handle import PipelineHandle, in_turn
from .vae import guarded_decoder, room_for_vae


@in_turn
def decode(
    handle: PipelineHandle,
    latents: torch.Tensor,
    *,
    tiling: bool = False,
    slicing: bool = False,
    chunk: int = 0,
    request: Precision | None = None,
    made_by: str | None = None,
    progress: CallTold | None = None,
) -> tuple[torch.Tensor, RunReport]:
    """Decode latents, in the family's layout, to [frames or images, height, width, 3] in 0..1, float32.

    tiling, slicing: decode in overlapping tiles, or one video of a batch at a time; slower, with less memory.
    chunk: frames or images decoded at once, where the VAE takes them apart (SVD, CogView); 0: all.
    made_by: the diffusers pipeline whose latents they are, where that is known.
    progress: is told each call of the decoder, of which there is one for every tile and chunk of frames.
    Raises BadInput where the latents are not this model's, GuardStopped where they are not finite, both before a weight
    is read; GuardStopped where the result is not finite.
    """
    stage = handle.stage(Component.VAE_DECODE, request)
    _check(handle, latents, made_by, policy=stage.policy)
    layout = handle.family.layout
    calls = Calls("decoding", progress or (lambda *_: None))
    vae = guarded_decoder(stage, calls)

    def parts(vae: Any, latents: torch.Tensor) -> Iterator[torch.Tensor]:
        vae.use_tiling, vae.use_slicing = tiling, slicing
        return layout.decoded(lambda part, **more: vae.decode(part, **more).sample.float(), latents, chunk)

    def each(vae: Any, latents: torch.Tensor) -> None:
        for _ in parts(vae, latents):
            pass

    def decoded() -> torch.Tensor:
        calls.done, calls.total = 0, calls_of_vae(vae, lambda counting: each(counting, latents.to("meta")))
        stage.place(lambda: room_for_vae(stage, "decoder", latents, each, tiling, slicing, chunk))
        return torch.cat([part.cpu() for part in parts(vae, latents.to(handle.store.placement.device))])

    def fewer_at_once() -> str:
        nonlocal chunk
        if not layout.takes_chunks or (chunk or len(latents)) == 1:
            return ""
        chunk = (chunk or len(latents)) // 2
        return f"{chunk} at once"

    def tiled() -> str:
        nonlocal tiling
        if tiling or not hasattr(vae, "tiled_decode"):
            return ""
        tiling = True
        return "tiling"

    halvings = [fewer_at_once] * len(latents).bit_length()
    try:
        with handle.switched(stage.report), torch.no_grad():
            pixels = stage.ladder().survive(decoded, [*halvings, tiled])
    finally:
        handle.finish("vae")
    return (pixels * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1), stage.report


def _check(handle: PipelineHandle, latents: torch.Tensor, made_by: str | None, policy: GuardPolicy) -> None:
    family, model = handle.family, handle.store.model
    channels = family.layout.channels(model.vae_config)
    wire = f"Wire them from a {family.name} sampler."
    if latents.ndim != family.layout.dimensions or latents.shape[1] != channels or not latents.numel():
        raise BadInput(
            f"The latents have shape {tuple(latents.shape)}, but {model.variant.name} decodes "
            f"{family.layout.shape.format(channels=channels)}. {wire}"
        )
    if made_by in FAMILIES and not FAMILIES[made_by].components.items() <= family.components.items():
        raise BadInput(
            f"The latents are {FAMILIES[made_by].name}'s, but {model.variant.name} is to decode them. {wire}"
        )
    broken = non_finite(latents)
    if broken and policy.on_failure is not OnFailure.OFF:
        raise GuardStopped(
            f"vae decode: {broken} of the latents' {latents.numel()} values are not finite already: the sampler made "
            "them so, or the file that held them is damaged. Sample again, guarded (precision 'auto' or 'fp16')."
        )
