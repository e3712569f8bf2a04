"""CogView3-Plus and CogView4: text → an image."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from ...precision.policy import Variant
from . import spec
from .spec import Config, FamilySpec

_TOKENS, _MOST_TOKENS = 224, 1024  # a prompt's tokens: CogView3-Plus pads to 224; CogView4 takes at most 1024


def _published(name: str, layers: int, heads: int) -> Variant:
    source = f"https://huggingface.co/zai-org/{name}"
    sizes = {"num_layers": layers, "num_attention_heads": heads}
    return Variant(name, "bf16", leaves_fp16=True, protected=True, components=spec.IMAGE, source=source, sizes=sizes)


_GLM_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "attention_dropout", "attention_bias"),
    *("max_position_embeddings", "initializer_range", "rms_norm_eps", "rope_theta", "partial_rotary_factor"),
    *("rope_scaling", "rope_parameters", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id"),
)


def _context(**every: int) -> spec.ContextPlan:
    """Return how several GPUs share a call. every: arguments of each block that have a row for each token of the
    picture → the dimension of the rows."""
    return spec.ContextPlan(
        tokens=lambda config, shape: (shape[2] // config["patch_size"]) * (shape[3] // config["patch_size"]),
        first={"hidden_states": 1, "encoder_hidden_states": 1},
        every=every,
        text="encoder_hidden_states",
    )


def _usual_size(config: Config, pixels: int) -> tuple[int, int, int]:
    side = config.get("sample_size", 0) * pixels
    return side, side, 1


def _step_inputs(
    config: Config, latents: tuple[int, ...], _options: Config, *, batch: int, tokens: int
) -> dict[str, Any]:
    """Return the arguments of a call, without values. batch: number of prompts. tokens: tokens of each."""
    sizes = dict.fromkeys(("original_size", "target_size", "crop_coords"), (batch, 2))
    return spec.without_values(
        hidden_states=(batch, config["in_channels"], *latents[2:]),
        encoder_hidden_states=(batch, tokens, _channels(config)),
        timestep=(batch,),
        **sizes,
    )


def _channels(config: Config) -> int:
    return config.get("text_embed_dim", 4096)


COGVIEW3PLUS = FamilySpec(
    name="CogView3-Plus",
    pipeline="CogView3PlusPipeline",
    components={
        "tokenizer": spec.T5_TOKENIZER,
        "text_encoder": spec.t5_encoder("T5EncoderModel"),
        "transformer": spec.diffusers_model("CogView3PlusTransformer2DModel"),
        "vae": spec.diffusers_model("AutoencoderKL"),
        "scheduler": spec.scheduler("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    },
    variants=(_published("CogView3-Plus-3B", 30, 64),),
    variant=lambda _config: "CogView3-Plus-3B",
    layout=spec.IMAGES,
    step_inputs=partial(_step_inputs, batch=2, tokens=_TOKENS),
    sizes=spec.SizeRule(pixel_multiple=32, pixels=(64, 2048)),  # by the authors: multiples of 32, best from 512 on
    usual_size=_usual_size,
    schedulers={"DDIM": "CogVideoXDDIMScheduler", "DPM": "CogVideoXDPMScheduler"},
    prompt=spec.PromptRule(
        tokens=lambda _config: _TOKENS,
        channels=_channels,
        no_negative_is_zero=True,  # as in the authors' sat/sample_dit.py, and in diffusers by default
    ),
    cached_blocks="transformer_blocks",
    context=_context(),
)

COGVIEW4 = replace(
    COGVIEW3PLUS,
    name="CogView4",
    pipeline="CogView4Pipeline",
    components={
        "tokenizer": spec.ComponentSpec(
            "transformers",
            ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"),
            spec.TOKENIZER_FIELDS,
            needs=(("tokenizer_config.json",), ("tokenizer.json",)),
            reads=spec.TOKENIZER_ALSO,
        ),
        "text_encoder": spec.ComponentSpec("transformers", ("GlmModel",), _GLM_FIELDS),
        "transformer": spec.diffusers_model("CogView4Transformer2DModel"),
        "vae": spec.diffusers_model("AutoencoderKL"),
        "scheduler": spec.scheduler("FlowMatchEulerDiscreteScheduler"),
    },
    variants=(_published("CogView4-6B", 28, 32),),
    variant=lambda _config: "CogView4-6B",
    step_inputs=partial(_step_inputs, batch=1, tokens=_MOST_TOKENS),
    schedulers={},
    prompt=spec.PromptRule(tokens=lambda _config: _MOST_TOKENS, channels=_channels, fixed=False),
    guidance=spec.Guidance(calls=2),
    context=_context(image_rotary_emb=0),
)

FAMILIES = (COGVIEW3PLUS, COGVIEW4)
