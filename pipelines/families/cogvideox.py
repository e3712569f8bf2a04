"""CogVideoX 1.0 and 1.5: text, an image or a video → a video."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...precision.policy import Variant
from . import spec
from .spec import Config, FamilySpec

if TYPE_CHECKING:
    import torch

_ZAI = "https://huggingface.co/zai-org"
_2B = {"num_layers": 30, "num_attention_heads": 30}
_5B = {"num_layers": 42, "num_attention_heads": 48}
_ADVISED = (1360, 768)  # pixels, for 1.5
_VARIANTS = (
    #       name                    trained leaves has    components
    #                               in      fp16   protected
    Variant("CogVideoX-2B",         "fp16", False, True,  spec.VIDEO, f"{_ZAI}/CogVideoX-2b", sizes=_2B),
    Variant("CogVideoX-5B",         "bf16", True,  True,  spec.VIDEO, f"{_ZAI}/CogVideoX-5b", sizes=_5B),
    Variant("CogVideoX-5B-I2V",     "bf16", True,  True,  spec.VIDEO, f"{_ZAI}/CogVideoX-5b-I2V", sizes=_5B),
    Variant("CogVideoX-1.5-5B",     "bf16", True,  True,  spec.VIDEO, f"{_ZAI}/CogVideoX1.5-5B", sizes=_5B),
    Variant("CogVideoX-1.5-5B-I2V", "bf16", True,  True,  spec.VIDEO, f"{_ZAI}/CogVideoX1.5-5B-I2V", sizes=_5B),
)  # fmt: skip


def _variant(config: Config) -> str:
    from_image = config.get("in_channels", 16) > config.get("out_channels", 16)
    if config.get("patch_size_t") is not None:
        return "CogVideoX-1.5-5B-I2V" if from_image or config.get("ofs_embed_dim") else "CogVideoX-1.5-5B"
    if not config.get("use_rotary_positional_embeddings", False):
        return "CogVideoX-2B"
    return "CogVideoX-5B-I2V" if from_image else "CogVideoX-5B"


def _usual_size(config: Config, pixels: int) -> tuple[int, int, int]:
    """Return the config's size; for 1.5, whose config has the largest size, the size that the authors advise."""
    wide, high, long = _sample_size(config, pixels)
    if config.get("patch_size_t") and wide >= _ADVISED[0] and high >= _ADVISED[1]:
        wide, high = _ADVISED
    return wide, high, long


def _sample_size(config: Config, pixels: int) -> tuple[int, int, int]:
    return (
        config.get("sample_width", 0) * pixels,
        config.get("sample_height", 0) * pixels,
        config.get("sample_frames", 0),
    )


def _bound(config: Config, pixels: int, width: int, height: int, frames: int) -> str:
    """Return which sizes a checkpoint makes; "" if it makes this one. Some have positions for one size (5B-I2V), or up
    to a size (1.5)."""
    wide, high, long = _sample_size(config, pixels)
    if config.get("use_learned_positional_embeddings"):
        if (width, height, frames) != (wide, high, long):
            return f"makes {wide}×{high} with {long} frames only, not {width}×{height} with {frames}."
    elif config.get("patch_size_t") and (width > wide or height > high):
        return f"makes up to {wide}×{high}, not {width}×{height}."
    return ""


def _temporal(config: Config) -> int:
    return int(config["temporal_compression_ratio"])


def _surplus(latents: int, config: Config) -> int:
    """Return the number of surplus frames that the VAE makes of `latents` latent frames. Of an odd number, the first
    latent frame becomes one frame; of an even number, it becomes as many as each other one, which repeat the first
    (https://github.com/zai-org/CogVideo/issues/786)."""
    return _temporal(config) - 1 if latents % 2 == 0 else 0


def _before_video(frames: int, config: Config, temporal: int) -> int:
    """Return how often to repeat a video's first frame in front, so that its latents fill 1.5's temporal patches, as in
    1.5's training. diffusers pads noise itself, but refuses such a video."""
    latents = (frames - 1) // temporal + 1
    return temporal * (-latents % (config.get("patch_size_t") or 1))


def _unscaled(latents: torch.Tensor, frames: int, config: Config) -> torch.Tensor:
    """Undo the VAE's scaling: [batch, frames, channels, height, width] → [batch, channels, frames, height, width].
    Drops the latent frames that 1.5 pads in front, to a multiple of its temporal patch.

    frames: frames of the video, not of the latents.
    """
    wanted = (frames - 1) // _temporal(config) + 1
    latents = latents[:, latents.shape[1] - wanted :].permute(0, 2, 1, 3, 4)
    return 1 / config["scaling_factor"] * latents


def _step_inputs(config: Config, latents: tuple[int, ...], _options: Config) -> dict[str, Any]:
    *_, frames, height, width = latents
    video = 2, frames + -frames % (config.get("patch_size_t") or 1), config["in_channels"], height, width
    inputs = spec.without_values(
        hidden_states=video,
        encoder_hidden_states=(2, _PROMPT.tokens(config), _PROMPT.channels(config)),
        timestep=(2,),
    )
    if config.get("use_rotary_positional_embeddings"):
        table = _tokens(config, video), config["attention_head_dim"]
        inputs[spec.ROTARY] = tuple(spec.without_values(cos=table, sin=table).values())
    return inputs | (spec.without_values(ofs=(1,)) if config.get("ofs_embed_dim") else {})


def _tokens(config: Config, shape: tuple[int, ...]) -> int:
    """Count the tokens of a video: [batch, frames, channels, height, width]."""
    _, frames, _, height, width = shape
    patch, long = config["patch_size"], config.get("patch_size_t") or 1
    return -(-frames // long) * (height // patch) * (width // patch)


_PROMPT = spec.PromptRule(
    tokens=lambda config: config.get("max_text_seq_length", 226),
    channels=lambda config: config.get("text_embed_dim", 4096),
)

COGVIDEOX = FamilySpec(
    name="CogVideoX",
    pipeline="CogVideoXPipeline",
    components={
        "tokenizer": spec.T5_TOKENIZER,
        "text_encoder": spec.t5_encoder("T5EncoderModel"),
        "transformer": spec.diffusers_model("CogVideoXTransformer3DModel"),
        "vae": spec.diffusers_model("AutoencoderKLCogVideoX"),
        "scheduler": spec.scheduler("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    },
    cached_blocks="transformer_blocks",
    context=spec.ContextPlan(
        _tokens,
        first={"hidden_states": 1, "encoder_hidden_states": 1},
        every={spec.ROTARY: 0},
        text="encoder_hidden_states",
    ),
    schedulers={"DPM": "CogVideoXDPMScheduler", "DDIM": "CogVideoXDDIMScheduler"},
    variants=_VARIANTS,
    variant=_variant,
    layout=spec.Layout(_unscaled, temporal=_temporal, surplus=_surplus, cache="conv_cache"),
    latent_format=lambda _config: "CogVideoX",
    step_inputs=_step_inputs,
    sizes=spec.SizeRule(pixel_multiple=16, frame_multiple=4),
    usual_size=_usual_size,
    bound=_bound,
    prompt=_PROMPT,
    from_video="CogVideoXVideoToVideoPipeline",
    before_video=_before_video,
)

COGVIDEOX_FROM_IMAGE = replace(
    COGVIDEOX,
    name="CogVideoX image-to-video",
    pipeline="CogVideoXImageToVideoPipeline",
    takes_image=True,
    from_video="",
)

FAMILIES = (COGVIDEOX, COGVIDEOX_FROM_IMAGE)
