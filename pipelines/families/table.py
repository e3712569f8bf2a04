"""What a model family is made of: one frozen spec each, the only place where a new model is added."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...precision.policy import Component
from ...precision.streams import Stream
from ..errors import BadSize
from . import layouts
from .layouts import Layout

Config = Mapping[str, Any]

ENCODERS = ("image_encoder", "vae")  # components that make what the denoiser starts from


@dataclass(frozen=True)
class ComponentSpec:
    """One folder of a diffusers pipeline."""

    library: str  # "diffusers" or "transformers"
    classes: tuple[str, ...]  # accepted in model_index.json; the first is the usual one
    weights: bool = True


@dataclass(frozen=True)
class SizeRule:
    """Sizes that a family can make."""

    pixel_multiple: int  # of width and height
    frame_multiple: int = 1  # frames = frame_multiple · k + 1
    pixels: tuple[int, int] = (16, 4096)  # least and most of width and height
    frames: tuple[int, int] = (1, 1025)

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
                raise BadSize(f"{name} is {value}, but must be {rule} {least} to {most}. Nearest: {good}.")


@dataclass(frozen=True)
class PromptRule:
    """How a family's prompts are encoded."""

    tokens: Callable[[Config], int]  # denoiser config → the most it takes
    fixed: bool = True  # padded to that number; else as long as the prompt is


@dataclass(frozen=True)
class FamilySpec:
    """A family of models that share a diffusers pipeline."""

    name: str
    pipeline: str  # diffusers class
    components: Mapping[str, ComponentSpec]
    denoiser: str  # name of the component that denoises
    blocks: tuple[str, ...]  # its parts that are compiled, a list of blocks block by block
    denoiser_inputs: tuple[str, ...]  # keyword arguments that carry activations
    variant: Callable[[Config], str]  # denoiser config → name in precision.policy.VARIANTS
    stream: Stream | None = None  # where its residual stream runs, which fp16 needs in float32
    clips: bool = False  # its blocks clip fp16 at ±65504: finite, and wrong
    layout: Layout = layouts.COGVIDEOX
    sizes: SizeRule = SizeRule(pixel_multiple=16, frame_multiple=4)
    schedulers: Mapping[str, str] = field(default_factory=dict)  # what users choose → diffusers class; none: its own
    prompt: PromptRule | None = None  # None: no text encoder
    takes_image: bool = False
    from_video: str = ""  # diffusers class that starts from a video instead of noise
    separate_guidance: bool = False  # the denoiser is called once with the prompt and once without, not with both

    @property
    def weighted(self) -> tuple[str, ...]:
        return tuple(name for name, component in self.components.items() if component.weights)

    def folder(self, component: Component) -> str:
        """Its name among the pipeline's components."""
        if component in (Component.VAE_ENCODE, Component.VAE_DECODE):
            return "vae"
        return self.denoiser if component is Component.DENOISER else component.value


def _cogvideox_variant(config: Config) -> str:
    from_image = config.get("in_channels", 16) > config.get("out_channels", 16)
    if config.get("patch_size_t") is not None:
        return "CogVideoX-1.5-5B-I2V" if from_image or config.get("ofs_embed_dim") else "CogVideoX-1.5-5B"
    if not config.get("use_rotary_positional_embeddings", False):
        return "CogVideoX-2B"
    return "CogVideoX-5B-I2V" if from_image else "CogVideoX-5B"


COGVIDEOX = FamilySpec(
    name="CogVideoX",
    pipeline="CogVideoXPipeline",
    components={
        "tokenizer": ComponentSpec("transformers", ("T5Tokenizer", "T5TokenizerFast"), weights=False),
        "text_encoder": ComponentSpec("transformers", ("T5EncoderModel",)),
        "transformer": ComponentSpec("diffusers", ("CogVideoXTransformer3DModel",)),
        "vae": ComponentSpec("diffusers", ("AutoencoderKLCogVideoX",)),
        "scheduler": ComponentSpec("diffusers", ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"), weights=False),
    },
    denoiser="transformer",
    blocks=("transformer_blocks",),
    denoiser_inputs=("hidden_states", "encoder_hidden_states"),
    stream=Stream(
        blocks="transformer_blocks",
        starts=("patch_embed.proj", "patch_embed.text_proj"),
        writers=("attn1.to_out.0", "ff.net.2"),
        norms=("norm1.norm", "norm2.norm"),
        last_norms=("norm_final",),
    ),
    schedulers={"DPM": "CogVideoXDPMScheduler", "DDIM": "CogVideoXDDIMScheduler"},
    variant=_cogvideox_variant,
    prompt=PromptRule(lambda config: config.get("max_text_seq_length", 226)),
    from_video="CogVideoXVideoToVideoPipeline",
)

COGVIDEOX_FROM_IMAGE = replace(
    COGVIDEOX,
    name="CogVideoX image-to-video",
    pipeline="CogVideoXImageToVideoPipeline",
    takes_image=True,
    from_video="",
)

_COGVIEW_SIZES = SizeRule(pixel_multiple=32, pixels=(64, 2048))  # their authors: multiples of 32, best from 512 on

COGVIEW3PLUS = FamilySpec(
    name="CogView3-Plus",
    pipeline="CogView3PlusPipeline",
    components={
        "tokenizer": ComponentSpec("transformers", ("T5Tokenizer", "T5TokenizerFast"), weights=False),
        "text_encoder": ComponentSpec("transformers", ("T5EncoderModel",)),
        "transformer": ComponentSpec("diffusers", ("CogView3PlusTransformer2DModel",)),
        "vae": ComponentSpec("diffusers", ("AutoencoderKL",)),
        "scheduler": ComponentSpec("diffusers", ("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"), weights=False),
    },
    denoiser="transformer",
    blocks=("transformer_blocks",),
    denoiser_inputs=("hidden_states", "encoder_hidden_states"),
    variant=lambda _config: "CogView3-Plus-3B",
    layout=layouts.IMAGES,
    sizes=_COGVIEW_SIZES,
    schedulers={"DDIM": "CogVideoXDDIMScheduler", "DPM": "CogVideoXDPMScheduler"},
    prompt=PromptRule(lambda _config: 224),
    stream=Stream(
        blocks="transformer_blocks",
        starts=("patch_embed.proj", "patch_embed.text_proj"),
        writers=("attn1.to_out.0", "ff.net.2"),
        norms=("norm1.norm_x", "norm1.norm_c", "norm2", "norm2_context"),
        last_norms=("norm_out.norm",),
    ),
    clips=True,
)

COGVIEW4 = FamilySpec(
    name="CogView4",
    pipeline="CogView4Pipeline",
    components={
        "tokenizer": ComponentSpec(
            "transformers", ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"), weights=False
        ),
        "text_encoder": ComponentSpec("transformers", ("GlmModel",)),
        "transformer": ComponentSpec("diffusers", ("CogView4Transformer2DModel",)),
        "vae": ComponentSpec("diffusers", ("AutoencoderKL",)),
        "scheduler": ComponentSpec("diffusers", ("FlowMatchEulerDiscreteScheduler",), weights=False),
    },
    denoiser="transformer",
    blocks=("transformer_blocks",),
    denoiser_inputs=("hidden_states", "encoder_hidden_states"),
    variant=lambda _config: "CogView4-6B",
    layout=layouts.IMAGES,
    sizes=_COGVIEW_SIZES,
    prompt=PromptRule(lambda _config: 1024, fixed=False),
    separate_guidance=True,
    stream=Stream(
        blocks="transformer_blocks",
        starts=("patch_embed.proj", "patch_embed.text_proj"),
        writers=("attn1.to_out.0", "ff.net.2"),
        norms=("norm1.norm", "norm1.norm_context", "norm2", "norm2_context"),
        last_norms=("norm_out.norm",),
        readers=("attn1", "ff"),
    ),
)

SVD = FamilySpec(
    name="Stable Video Diffusion",
    pipeline="StableVideoDiffusionPipeline",
    components={
        "feature_extractor": ComponentSpec(
            "transformers", ("CLIPImageProcessor", "CLIPImageProcessorPil", "CLIPImageProcessorFast"), weights=False
        ),
        "image_encoder": ComponentSpec("transformers", ("CLIPVisionModelWithProjection",)),
        "unet": ComponentSpec("diffusers", ("UNetSpatioTemporalConditionModel",)),
        "vae": ComponentSpec("diffusers", ("AutoencoderKLTemporalDecoder",)),
        "scheduler": ComponentSpec("diffusers", ("EulerDiscreteScheduler",), weights=False),
    },
    denoiser="unet",
    blocks=("down_blocks", "mid_block", "up_blocks"),
    denoiser_inputs=("sample", "encoder_hidden_states"),
    variant=lambda config: "SVD" if config.get("num_frames", 25) <= 14 else "SVD-XT",  # XT 1.1's config is XT's
    layout=layouts.FRAMES,
    sizes=SizeRule(pixel_multiple=64, frames=(2, 200), pixels=(64, 4096)),  # diffusers cannot guide a single frame
    takes_image=True,
)

FAMILIES: dict[str, FamilySpec] = {
    family.pipeline: family for family in (COGVIDEOX, COGVIDEOX_FROM_IMAGE, COGVIEW3PLUS, COGVIEW4, SVD)
}
