"""The spec of a family of models, which holds all that is particular to it. Each family has a module of its own, and
`table` finds its `FAMILIES`: a new family is a new module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...precision.overrides import Stream
from ...precision.policy import Component, Variant
from ..errors import BadSize
from ..parallel.plan import ContextPlan
from .components import ComponentSpec, Fields
from .layouts import Config, Layout

IMAGE = (Component.TEXT_ENCODER, Component.DENOISER, Component.VAE_DECODE)
VIDEO = (Component.TEXT_ENCODER, Component.VAE_ENCODE, Component.DENOISER, Component.VAE_DECODE)
FROM_IMAGE = (Component.IMAGE_ENCODER, Component.VAE_ENCODE, Component.DENOISER, Component.VAE_DECODE)
ENCODERS = ("image_encoder", "vae")  # components that make what the denoiser starts from


@dataclass(frozen=True)
class SizeRule:
    """The sizes of pictures and videos that a family can make."""

    pixel_multiple: int  # of width and height
    frame_multiple: int = 1  # frames = frame_multiple · k + 1
    pixels: tuple[int, int] = (16, 4096)  # least and most of width and height
    frames: tuple[int, int] = (1, 1025)

    def most_frames(self, frames: int) -> int:
        """Return the largest number of frames that can be made and is not above this one."""
        return max(1, frames - (frames - 1) % self.frame_multiple)

    def check(self, **sizes: int) -> None:
        """Raise BadSize with the nearest good value for the first size that does not fit."""
        for name, value in sizes.items():
            step, offset, (least, most) = (
                (self.frame_multiple, 1, self.frames) if name == "frames" else (self.pixel_multiple, 0, self.pixels)
            )
            good = min(max(round((value - offset) / step) * step + offset, least), most)
            if value != good:
                rule = f"{step}·k + {offset} from" if offset else f"a multiple of {step} from"
                rule = "from" if step == 1 else rule
                raise BadSize("{} is {}, but must be {} {} to {}. Nearest: {}.", name, value, rule, least, most, good)


@dataclass(frozen=True)
class PromptRule:
    """How a family's prompts are encoded."""

    tokens: Callable[[Config], int]  # denoiser config → the most it takes
    channels: Callable[[Config], int]  # denoiser config → of an embedding
    fixed: bool = True  # padded to that number; else as long as the prompt is
    masked: bool = False  # whether the text encoder is told which tokens are padding


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, where its scale is above 1."""

    calls: int = 1  # of the denoiser in a step: one with both halves, or one each
    argument: str = "guidance_scale"  # the pipeline's, of the scale
    first: str = ""  # its argument of the first frame's scale, where that grows to the last one's


# (denoiser config, pixels of a latent's side) → width, height and frames that it was made for; 0: it does not say
UsualSize = Callable[[Config, int], tuple[int, int, int]]

# (denoiser config, pixels of a latent's side, width, height, frames) → what a checkpoint makes instead; "": that
Bound = Callable[[Config, int, int, int, int], str]

# (denoiser config with its class's defaults, shape of the latents to be decoded, options of model_index.json) → keyword
# arguments of the denoiser's first call in a step with guidance, as tensors in float32 on "meta"
StepInputs = Callable[[Config, tuple[int, ...], Config], dict[str, Any]]


@dataclass(frozen=True)
class FamilySpec:
    """A family of models that share a diffusers pipeline: all that is particular to it."""

    name: str
    pipeline: str  # diffusers class
    components: Mapping[str, ComponentSpec]
    denoiser: str  # name of the component that denoises
    blocks: tuple[str, ...]  # its parts that are compiled, a list of blocks block by block
    denoiser_inputs: tuple[str, ...]  # keyword arguments that carry activations
    variants: tuple[Variant, ...]  # of this family, and of those in the same module
    variant: Callable[[Config], str]  # denoiser config → name of a variant
    layout: Layout
    step_inputs: StepInputs
    sizes: SizeRule
    usual_size: UsualSize
    bound: Bound = lambda *_: ""
    also_denoise: tuple[str, ...] = ()  # components that the pipeline calls for later timesteps
    extended: Mapping[str, FamilySpec] = field(default_factory=dict)  # further component → family of folders with it
    options: type[Fields] = Fields  # fields of model_index.json that the pipeline takes
    stream: Stream | None = None  # where its residual stream runs, which fp16 needs in float32
    of_prompt: tuple[str, ...] = ()  # layers that are given the prompt alone: once a run is enough
    cached_blocks: str = ""  # ModuleList of which the step cache skips all but the first block; "": no step cache
    clips: bool = False  # its blocks clip fp16 at ±65504: finite, and wrong
    schedulers: Mapping[str, str] = field(default_factory=dict)  # what users choose → diffusers class; none: its own
    prompt: PromptRule | None = None  # None: no text encoder
    latent_format: Callable[[Config], str] = lambda _config: ""  # VAE config → ComfyUI's name of such latents, if any
    takes_image: bool = False
    from_video: str = ""  # diffusers class that starts from a video instead of noise
    before_video: Callable[[int, Config, int], int] = lambda *_: (
        0
    )  # (frames, denoiser config, frames of a latent) → how
    # often a video's first frame has to be repeated in front, which the layout drops again
    guidance: Guidance = Guidance()
    authors_names: tuple[tuple[str, str], ...] = ()  # (pattern in diffusers' name of a layer, what stands there in its
    # authors' name), one after the other
    image_layers: str = ""  # pattern of layers, under either name, that only denoisers which take an image have
    context: ContextPlan | None = None  # how several GPUs share a call of the denoiser; None: they cannot

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Names of the components that denoise, in the order in which they are called."""
        return (self.denoiser, *self.also_denoise)

    def of(self, index: Mapping[str, object]) -> FamilySpec:
        """Return the family of a folder, which may hold more components than this one's. index: its
        model_index.json."""
        return next(
            (family for name, family in self.extended.items() if index.get(name) not in (None, [None, None])), self
        )

    @property
    def weighted(self) -> tuple[str, ...]:
        return tuple(name for name, component in self.components.items() if component.weights)

    def folder(self, component: Component) -> str:
        """Return the name that a component has among the pipeline's."""
        if component in (Component.VAE_ENCODE, Component.VAE_DECODE):
            return "vae"
        return self.denoiser if component is Component.DENOISER else component.value
