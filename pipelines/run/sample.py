"""Samples: prompt embeddings, an image or a video → latents, by the diffusers pipeline's own denoising loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch

from ...precision.layer_peaks import non_finite
from ...precision.policy import Component, Precision
from ...precision.process_state import PROCESS_GATE
from ...precision.report import RunReport, counted
from ...precision.shallow_copy import reporting, with_forward
from ...trust.message import BadInput, Message
from ..compile.auto_compile import with_backend_of_run
from ..compile.backends import EAGER
from ..errors import BadSize
from ..families.spec import ENCODERS, FamilySpec
from ..weights.placement import OomFallback
from . import vae
from .denoiser import features_of, guarded_denoiser
from .feature import RunContext, Tell
from .handle import PipelineHandle, in_turn, save_profile
from .previews import Previews
from .stage import Calls, ComponentStage

MakeDenoiser = Callable[[ComponentStage], torch.nn.Module]
StepDone = Callable[[int, int, RunReport], None]  # steps done, number of steps, report so far; may raise, to interrupt


@dataclass(frozen=True)
class SampleSettings:
    width: int  # pixels
    height: int  # pixels
    steps: int
    seed: int
    frames: int = 1
    guidance_scale: float | None = None  # 1 or less: no classifier-free guidance, and no negative prompt
    guidance_scale_2: float | None = None  # scale of a second denoiser; None: the same
    scheduler: str = ""  # a key of the family's schedulers; "": the folder's own
    strength: float | None = None  # from a video: fraction of the steps to compute, 0..1
    more: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the diffusers pipeline

    @property
    def computed_steps(self) -> int:
        return self.steps if self.strength is None else min(int(self.steps * self.strength), self.steps)

    def scale(self, family: FamilySpec) -> float:
        """Return the pipeline's guidance scale; the last frame's if the scale grows from frame to frame."""
        return self.told(family, family.guidance.argument, self.guidance_scale)

    def told(self, family: FamilySpec, argument: str, own: Any = None) -> Any:
        """Return the value of a pipeline's argument: from `more`, else `own`; if None, the pipeline's default."""
        import diffusers

        usual = inspect.signature(getattr(diffusers, family.pipeline).__call__).parameters[argument].default
        found = self.more.get(argument, own)
        return usual if found is None else found


@in_turn
def sample(
    handle: PipelineHandle,
    positive: torch.Tensor | None,  # [batch, tokens, channels] embeddings; None for families without a prompt
    negative: torch.Tensor | None,
    settings: SampleSettings,
    *,
    image: Any = None,  # a PIL image, for families that start from one
    video: list[Any] | None = None,  # PIL images to start from instead of noise
    request: Precision | None = None,
    step_done: StepDone | None = None,
    tell: Tell
    | None = None,  # is given a line on what takes long before a step and within one; may raise, to interrupt
    previews: Previews | None = None,
    unused: tuple[str, ...] = (),  # of the inputs, for the report's warnings; told before the first step
    denoiser: MakeDenoiser | None = None,  # makes the one that the diffusers pipeline is given; `guarded_denoiser` does
) -> tuple[torch.Tensor, RunReport]:
    """Denoise. Returns latents in the family's layout, as its VAE takes them, and the report.

    Latents and scheduler stay in float32, and noise is drawn on the CPU, so that a seed gives the same noise in every
    precision and on every card; the guard casts what enters the denoiser to the plan's dtype.
    Raises BadSize, BadInput before anything is loaded; GuardStopped where a step cannot be saved.
    """
    family = handle.family
    check_size(handle, settings)
    check_start(handle, image, video)
    _check_steps(settings)
    _check_guidance(handle.family, settings)
    embeddings = _checked_embeddings(handle, positive, negative)
    if video is not None:
        model = handle.store.model
        before = family.before_video(len(video), model.denoiser_config, family.layout.temporal(model.vae_config))
        video = [video[0]] * before + video
    compile_key = ""
    if handle.backend.automatic and handle.backend.name != EAGER:
        handle, compile_key = with_backend_of_run(handle, request)
    stages = handle.denoising(request)
    report = stages[0].report
    if handle.step_cache and not family.cached_blocks:
        unused += (Message("The step cache is not used: its error estimate does not hold for {}.", family.name),)
    report.warnings += unused
    guided = settings.scale(family) > 1
    report.calls_per_step = family.guidance.calls if guided else 1
    run = RunContext(
        handle,
        stages[0].plan,
        report,
        settings,
        guided=guided,
        prompts=tuple(embeddings.values()) if report.calls_per_step > 1 else (),
        previews=previews,
        tell=tell or (lambda _: None),
        compile_key=compile_key,
    )
    features = features_of(run)
    for feature in features:
        stages = tuple(map(feature.prepare, stages))

    def on_step_end(_pipe: Any, step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        for feature in features:
            feature.on_step_end(values["latents"])
        if step_done:
            step_done(step + 1, settings.computed_steps, report)
        PROCESS_GATE.yield_()
        return values

    for each in unused:
        run.tell(each)
    try:
        with ExitStack() as around, torch.no_grad():
            for feature in features:
                around.enter_context(feature.around_run())
            around.enter_context(handle.switched(report))
            pipe = _pipeline(stages, run, denoiser or partial(guarded_denoiser, features=features), request, video)
            generator = torch.Generator("cpu").manual_seed(settings.seed)
            _draw_from(generator, pipe.scheduler)
            for feature in features:
                feature.wrap_pipeline(pipe)
            if embeddings:  # else diffusers' CogView3-Plus replaces an encoded negative prompt by zeros
                pipe.encode_prompt = lambda *_, **__: tuple(embeddings.values())
            given = {
                "image": image,
                "video": video,
                "strength": settings.strength,
                family.guidance.argument: settings.guidance_scale,
                "guidance_scale_2": settings.guidance_scale_2 if family.also_denoise else None,
                "num_frames": settings.frames if family.layout.counts_frames and video is None else None,
                **embeddings,
                **settings.more,
            }
            result = pipe(
                width=settings.width,
                height=settings.height,
                num_inference_steps=settings.steps,
                generator=generator,
                callback_on_step_end=on_step_end,
                output_type="latent",
                **{name: value for name, value in given.items() if value is not None},
            )
    finally:
        for layers in handle.store.quantised.values():
            layers.empty()
        handle.finish(*family.denoisers, *ENCODERS)
        for stage in stages:
            save_profile(handle, stage.memory_key)
    latents = result.frames if family.layout.counts_frames else result.images
    if (broken := non_finite(latents)) and not report.failed:
        report.warnings += (
            Message(
                "{} of the latents' {} values are NaN or infinite, although the model's outputs were finite: its {} "
                "made them. Choose another scheduler, or repair 'scheduler_config.json' in the model's folder.",
                broken,
                latents.numel(),
                type(pipe.scheduler).__name__,
            ),
        )
    config = handle.store.model.vae_config
    latents = family.layout.unscaled(latents, settings.frames, config)
    return latents.cpu().contiguous(), report  # for ComfyUI 0.0.1's SaveLatent


def _draw_from(generator: torch.Generator, scheduler: Any) -> None:
    """Have a scheduler draw noise from a run's generator. Pipelines with flow schedulers pass none, and stochastic
    sampling would draw from PyTorch's global generator.

    scheduler: used for this run alone, since its `step` is replaced.
    """
    step = scheduler.step
    if "generator" in inspect.signature(step).parameters:
        scheduler.step = wraps(step)(partial(step, generator=generator))


def _pipeline(
    stages: Sequence[ComponentStage],
    run: RunContext,
    denoiser: MakeDenoiser,
    request: Precision | None,
    video: list[Any] | None,
) -> Any:
    """Return a diffusers pipeline with the run's guarded components. It holds no weights of its own."""
    import diffusers

    def told(_done: int, _total: int, text: str) -> None:
        run.tell(text)

    handle, before = run.handle, run.report.before
    family, config, from_video = handle.family, handle.store.model.vae_config, video is not None
    scheduler = run.settings.scheduler if run.settings else ""
    parts: dict[str, Any] = {**dict.fromkeys(family.components), **handle.store.model.options}
    own = handle.store.unweighted("scheduler")
    kind = getattr(diffusers, family.schedulers[scheduler]) if scheduler else type(own)
    parts["scheduler"] = kind.from_config(own.config)
    if family.takes_image or from_video:
        calls = Calls("encoding video, part {} of {}" if from_video else "encoding image, part {} of {}", told)
        encoding = handle.stage(Component.VAE_ENCODE, request)
        parts["vae"] = vae.guarded_encoder(encoding, calls)
        before.append(encoding.report)
    if "image_encoder" in parts:
        encoding = handle.stage(Component.IMAGE_ENCODER, request)
        parts["image_encoder"] = _guarded_image_encoder(encoding, Calls("image encoder, call {} of {}", told, total=1))
        parts["feature_extractor"] = handle.store.unweighted("feature_extractor")
        before.append(encoding.report)
    for stage in stages:
        parts[stage.name] = denoiser(stage)
    pipe = getattr(diffusers, family.from_video if from_video else family.pipeline)(**parts)
    pipe.vae_scale_factor = pipe.vae_scale_factor_spatial = family.layout.spatial(config)
    pipe.vae_scale_factor_temporal = family.layout.temporal(config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _guarded_image_encoder(stage: ComponentStage, calls: Calls) -> torch.nn.Module:
    guard, fallback = stage.guard(stage.module, stage.module), OomFallback(stage)

    def encoded(pixels: torch.Tensor) -> Any:
        stage.place()
        return guard(pixels)

    def encode(pixels: torch.Tensor) -> Any:
        output = stage.handle.ranks.broadcast_from_rank0(lambda: fallback.run(lambda: encoded(pixels)))
        output.image_embeds = output.image_embeds.float()  # diffusers uses its dtype for the latents
        return output

    shell = with_forward(stage.module, calls.telling(encode))
    return reporting(shell, dtype=torch.float32, device=stage.handle.store.placement.device)


def check_size(handle: PipelineHandle, settings: SampleSettings) -> None:
    """Raise BadSize if the model cannot make the size."""
    family, model = handle.family, handle.store.model
    size, long = (settings.width, settings.height, settings.frames), family.layout.temporal(model.vae_config)
    if not family.layout.counts_frames and settings.frames != 1:
        raise BadSize("{} makes images, not {} frames.", model.variant.name, settings.frames)
    family.sizes.check(width=settings.width, height=settings.height, frames=settings.frames)
    if (settings.frames - 1) % long:
        raise BadSize("frames is {}, but {} needs {}·k + 1.", settings.frames, model.variant.name, long)
    if bound := family.bound(model.denoiser_config, family.layout.spatial(model.vae_config), *size):
        raise BadSize("{} {}", model.variant.name, bound)


def check_start(handle: PipelineHandle, image: Any, video: Any) -> None:
    """Raise BadInput if the model needs an image and gets none, or gets an image or a video that it does not take."""
    family, name = handle.family, handle.store.model.variant.name
    if family.takes_image and image is None:
        raise BadInput("{} needs a start image. Wire one to 'image'.", name)
    if image is not None and not family.takes_image:
        raise BadInput("{} does not accept a start image. Disconnect it, or load an image-to-video model (I2V).", name)
    if video is not None and not family.from_video:
        raise BadInput("{} does not accept a start video. Disconnect it, or load a text-to-video model.", name)


def _check_steps(settings: SampleSettings) -> None:
    """Raise BadInput if steps × strength is less than one step."""
    if settings.strength is not None and settings.computed_steps < 1:
        raise BadInput(
            "{} × strength {:g} is less than one step. Raise steps or strength until their product is 1 or more.",
            *(counted(settings.steps, "1 step", "{} steps"), settings.strength),
        )


def _check_guidance(family: FamilySpec, settings: SampleSettings) -> None:
    """diffusers encodes for guidance where the last frame's scale is above 1, and guides where the largest is. Raises
    BadInput where these differ."""
    if not family.guidance.first:
        return
    first, last = settings.told(family, family.guidance.first), settings.scale(family)
    if last <= 1 < first:
        at_first, at_last = family.guidance.first, family.guidance.argument
        facts = at_first, first, at_last, last, at_last, at_first
        raise BadInput("{} is {:g}, but {} is {:g}, which switches guidance off. Set {} above 1, or {} to 1.", *facts)


def _checked_embeddings(
    handle: PipelineHandle, positive: torch.Tensor | None, negative: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the embeddings by the pipeline's argument names. Raises BadInput if they do not fit the model."""
    rule, config = handle.family.prompt, handle.store.model.denoiser_config
    if rule is None or positive is None or negative is None:
        return {}
    channels, tokens = rule.channels(config), rule.tokens(config)
    for name, embeddings in (("positive", positive), ("negative", negative)):
        fits = embeddings.ndim == 3 and embeddings.shape[-1] == channels
        if not fits or (embeddings.shape[1] != tokens if rule.fixed else embeddings.shape[1] > tokens + 15):
            raise BadInput(
                "'{}' has shape {}, but {} takes [batch, {}, {}]. Connect it to an Encode Prompt node with the same "
                "pipeline.",
                *(name, tuple(embeddings.shape), handle.store.model.variant.name, tokens, channels),
            )
    if len(positive) != len(negative) or (rule.fixed and positive.shape != negative.shape):
        raise BadInput(
            "'positive' has shape {} and 'negative' {}; they must be equal. Use one Encode Prompt node for both.",
            tuple(positive.shape),
            tuple(negative.shape),
        )
    device = handle.store.placement.device
    return {
        "prompt_embeds": positive.to(device, torch.float32),
        "negative_prompt_embeds": negative.to(device, torch.float32),
    }
