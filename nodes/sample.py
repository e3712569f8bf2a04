"""The base class of all families' samplers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..comfyui_host import host
from ..trust.message import Message, joined
from . import inputs
from .node import Node, titled
from .stage_node import embeddings, only_first, requested, running, ui

if TYPE_CHECKING:
    import torch

    from ..pipelines.families.spec import SizeRule
    from ..pipelines.run.handle import PipelineHandle
    from ..precision.report import RunReport


class Sampler(Node):
    """Pipeline, and prompts, an image or a video → latents, and a report of every step."""

    PIPELINES: tuple[str, ...]  # the diffusers pipelines that it samples
    DIFFUSERS: Mapping[str, str] = {}  # input → its name in the diffusers pipeline, if that differs
    CATEGORY = inputs.SAMPLE
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latents", "report")
    OUTPUT_TOOLTIPS = (
        "Wire them to Decode Latents, with the same pipeline, or save them and decode later.",
        inputs.REPORT,
    )
    FUNCTION = "sample"
    TOGETHER = True
    HAS_INTERMEDIATE_OUTPUT = True

    @classmethod
    def settings(cls, sizes: SizeRule) -> dict[str, Any]:
        """Return the inputs after the pipeline. Their order is fixed, since saved workflows hold values by position.

        Inputs that are arguments of `sample` are handled there. The others become fields of `SampleSettings` if it has
        such a field, else arguments of the diffusers pipeline. sizes: the sizes that the family can make.
        """
        raise NotImplementedError

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        from ..pipelines.families.table import FAMILIES

        settings = cls.settings(FAMILIES[cls.PIPELINES[0]].sizes)
        return {"required": {"pipeline": inputs.pipeline(), **settings}, "hidden": inputs.node_id()}

    def sample(
        self,
        pipeline: PipelineHandle,
        *,
        precision: str,
        positive: list[Any] | None = None,
        negative: list[Any] | None = None,
        image: torch.Tensor | None = None,
        video: torch.Tensor | None = None,
        fit: str = inputs.FITS[0],
        strength: float = inputs.STRENGTH,
        node_id: str | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        """Denoise with progress shown on the node. settings: the values of `settings` that are not named here."""
        from ..comfyui_host.previews import previews
        from ..comfyui_host.tagged_tensor import latents_of
        from ..pipelines.run.pictures import fitted
        from ..pipelines.run.sample import SampleSettings, check_start, sample

        self._check_family(pipeline)
        check_start(pipeline, image, video)
        prompts = embeddings(positive, "positive"), embeddings(negative, "negative")
        start: dict[str, Any] = {}
        unused: tuple[str, ...] = ()
        if image is not None:
            start["image"] = fitted(image[:1], settings["width"], settings["height"], fit)[0]
            unused += only_first(image)
        if video is not None:
            if video.ndim == 4:  # else `fitted` raises
                video, unused = _cut(video, settings["frames"], pipeline.family.sizes)
            start["video"] = fitted(video, settings["width"], settings["height"], fit)
            settings |= {"frames": len(start["video"]), "strength": strength}
        more = [name for name in settings if name not in SampleSettings.__dataclass_fields__]
        further = {self.DIFFUSERS.get(name, name): settings.pop(name) for name in more}
        wanted = SampleSettings(**settings, more=further)
        if wanted.guidance_scale_2 and not pipeline.family.also_denoise:
            unused += (Message("guidance_scale_2 is not used: this model has no second transformer."),)
        elif wanted.guidance_scale_2 and wanted.scale(pipeline.family) <= 1:
            unused += (Message("guidance_scale_2 is not used: a guidance_scale of 1 or less switches guidance off."),)
        progress = host.Progress(wanted.computed_steps, node_id)

        def step_done(done: int, total: int, report: RunReport) -> None:
            at, numerics = Message("step {}/{}", done, total), report.plan.numerics
            line = joined(" · ", filter(None, (at, numerics, report.recomputed())))
            progress.update(done, line, more=report.finding())

        with running(pipeline), progress:
            latents, report = sample(
                pipeline,
                *prompts,
                wanted,
                unused=unused,
                request=requested(precision),
                step_done=step_done,
                tell=progress.tell,
                previews=previews(progress),
                **start,
            )
        made = latents_of(latents, pipeline.store.model.variant.name)
        latent = {"samples": made, "made_by": pipeline.family.pipeline}
        text = report.text() if pipeline.full_report else report.summary()
        return {"ui": ui(report, node_id), "result": (latent, text)}

    def _check_family(self, pipeline: PipelineHandle) -> None:
        """Raise BadInput, which names the node to use, if this node does not sample the pipeline's family."""
        from ..pipelines.families.table import FAMILIES
        from ..trust.message import BadInput

        family = pipeline.family
        if family.pipeline in self.PIPELINES:
            return
        raise BadInput(
            "The pipeline is for {} ({}), but {} samples {}. Use {}.",
            family.name,
            pipeline.store.model.variant.name,
            self.TITLE,
            " and ".join(FAMILIES[name].name for name in self.PIPELINES),
            samplers_of(pipeline),
        )


def _cut(video: torch.Tensor, frames: int, sizes: SizeRule) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Return the first `frames` frames of a video, or fewer if the model cannot make as many; and a warning if frames
    are left out. Raises BadSize if only one of several would be left."""
    from ..pipelines.errors import BadSize

    asked = min(frames, len(video))
    used = sizes.most_frames(asked)
    if used == 1 < asked:
        least = sizes.frame_multiple + 1
        raise BadSize(
            "{} frames of the video would be used, but at least {} are needed. Use a longer video or more frames, or "
            "set frames to 1 for an image.",
            asked,
            least,
        )
    if used < asked:
        told = Message(
            "Of the video, {} frames are used, not {}: the model needs {}·k + 1.", used, asked, sizes.frame_multiple
        )
    else:
        told = Message("Of the video's {} frames, the first {} are used: 'frames' is {}.", len(video), used, frames)
    return video[:used], (told,) if used < len(video) else ()


def samplers_of(pipeline: PipelineHandle) -> str:
    """Return the titles of the nodes that sample a pipeline, in words."""
    return " or ".join(node.TITLE for node in titled(Sampler) if pipeline.family.pipeline in node.PIPELINES)
