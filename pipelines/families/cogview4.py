"""CogView4: text → an image."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field

from ...precision.overrides import Stream
from ...precision.policy import Variant
from .cogview import SIZES, ZAI, CogView, channels, context, step_inputs, usual_size
from .components import (
    IMAGE_VAE,
    TOKENIZER_ALSO,
    ComponentSpec,
    Fields,
    Layers,
    Number,
    Positive,
    Token,
    Tokenizer,
    Tokens,
    Width,
    Word,
    scheduler,
)
from .spec import IMAGE, IMAGES, FamilySpec, Guidance, PromptRule

_MOST_TOKENS = 1024
_VARIANT = Variant(
    "CogView4-6B",
    trained_in="bf16",
    leaves_fp16=True,
    has_stream=True,
    components=IMAGE,
    source=f"{ZAI}/CogView4-6B",
    sizes={"num_layers": 28, "num_attention_heads": 32},
)


class _Glm(Fields):
    vocab_size: Width
    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    num_key_value_heads: Width | None
    head_dim: Width
    hidden_act: Word
    attention_dropout: Number
    attention_bias: bool
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**24)]
    initializer_range: Number
    rms_norm_eps: Positive
    rope_theta: Positive
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)]
    rope_scaling: dict[Word, Positive | Word] | None
    rope_parameters: dict[Word, Positive | Word] | None
    tie_word_embeddings: bool
    pad_token_id: Token | None
    bos_token_id: Tokens
    eos_token_id: Tokens


COGVIEW4 = FamilySpec(
    name="CogView4",
    pipeline="CogView4Pipeline",
    components={
        "tokenizer": ComponentSpec(
            "transformers",
            ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"),
            Tokenizer,
            needs=(("tokenizer_config.json",), ("tokenizer.json",)),
            reads=TOKENIZER_ALSO,
        ),
        "text_encoder": ComponentSpec("transformers", ("GlmModel",), _Glm),
        "transformer": ComponentSpec("diffusers", ("CogView4Transformer2DModel",), CogView),
        "vae": IMAGE_VAE,
        "scheduler": scheduler("FlowMatchEulerDiscreteScheduler"),
    },
    denoiser="transformer",
    blocks=("transformer_blocks",),
    denoiser_inputs=("hidden_states", "encoder_hidden_states"),
    of_prompt=("patch_embed.text_proj",),
    variants=(_VARIANT,),
    variant=lambda _config: "CogView4-6B",
    layout=IMAGES,
    step_inputs=partial(step_inputs, batch=1, tokens=_MOST_TOKENS),
    sizes=SIZES,
    usual_size=usual_size,
    prompt=PromptRule(tokens=lambda _config: _MOST_TOKENS, channels=channels, fixed=False),
    guidance=Guidance(calls=2),
    cached_blocks="transformer_blocks",
    context=context(image_rotary_emb=0),
    stream=Stream(
        blocks="transformer_blocks",
        starts=("patch_embed.proj", "patch_embed.text_proj"),
        writers=("attn1.to_out.0", "ff.net.2"),
        norms=("norm1.norm", "norm1.norm_context", "norm2", "norm2_context"),
        last_norms=("norm_out.norm",),
        readers=("attn1", "ff"),
    ),
)

FAMILIES = (COGVIEW4,)
