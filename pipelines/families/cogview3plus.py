"""CogView3-Plus: text → an image."""

from __future__ import annotations

from functools import partial

from ...precision.overrides import Stream
from ...precision.policy import Variant
from .cogview import SIZES, ZAI, CogView, channels, context, step_inputs, usual_size
from .components import IMAGE_VAE, T5_ENCODER, T5_TOKENIZER, ComponentSpec, scheduler
from .spec import IMAGE, IMAGES, FamilySpec, PromptRule

_TOKENS = 224
_VARIANT = Variant(
    "CogView3-Plus-3B",
    trained_in="bf16",
    leaves_fp16=True,
    has_stream=True,
    components=IMAGE,
    source=f"{ZAI}/CogView3-Plus-3B",
    sizes={"num_layers": 30, "num_attention_heads": 64},
)

COGVIEW3PLUS = FamilySpec(
    name="CogView3-Plus",
    pipeline="CogView3PlusPipeline",
    components={
        "tokenizer": T5_TOKENIZER,
        "text_encoder": T5_ENCODER,
        "transformer": ComponentSpec("diffusers", ("CogView3PlusTransformer2DModel",), CogView),
        "vae": IMAGE_VAE,
        "scheduler": scheduler("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"),
    },
    denoiser="transformer",
    blocks=("transformer_blocks",),
    denoiser_inputs=("hidden_states", "encoder_hidden_states"),
    of_prompt=("patch_embed.text_proj",),
    variants=(_VARIANT,),
    variant=lambda _config: "CogView3-Plus-3B",
    layout=IMAGES,
    step_inputs=partial(step_inputs, batch=2, tokens=_TOKENS),
    sizes=SIZES,
    usual_size=usual_size,
    schedulers={"DDIM": "CogVideoXDDIMScheduler", "DPM": "CogVideoXDPMScheduler"},
    prompt=PromptRule(tokens=lambda _config: _TOKENS, channels=channels),
    cached_blocks="transformer_blocks",
    context=context(),
    stream=Stream(
        blocks="transformer_blocks",
        starts=("patch_embed.proj", "patch_embed.text_proj"),
        writers=("attn1.to_out.0", "ff.net.2"),
        norms=("norm1.norm_x", "norm1.norm_c", "norm2", "norm2_context"),
        last_norms=("norm_out.norm",),
    ),
    clips=True,
)

FAMILIES = (COGVIEW3PLUS,)
