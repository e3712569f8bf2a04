"""The smallest single file that ComfyUI's own loader accepts as SD1.5.

ComfyUI recognises this model by the widths of the UNet and its context. It builds text encoder and VAE in the published
sizes in any case. So the UNet has one level, the rest has full size, and the encoder's layers are zeros except the
first.
"""

from __future__ import annotations

from pathlib import Path

import svd_layout
import torch
from safetensors.torch import save_file
from svd_layout import UNET, VAE, Keys, autoencoder, conv, norm, resblock, transformer

WIDTH, CONTEXT, EMBEDDED = 320, 768, 1280  # widths by which SD1.5 is recognised, and four times the first
TEXT = "cond_stage_model.transformer.text_model."
TOKENS, LENGTH, LAYERS = 49408, 77, 12
ENCODER = f"{TEXT}encoder.layers."
OVERFLOWING = (  # multiplied by 3e5 these overflow fp16; in fp32 the next norm removes the factor
    f"{UNET}input_blocks.1.0.in_layers.2.weight",
    f"{VAE}decoder.mid.block_1.conv1.weight",
)


def write_sd15(file: Path, *, overflows: bool) -> None:
    shapes = dict(sd15())
    idle = {key for key in shapes if is_idle(key)}
    weights = svd_layout.draw({key: shape for key, shape in shapes.items() if key not in idle})
    for key in OVERFLOWING if overflows else ():
        weights[key] *= 3e5
    halves = {key: weight.half() for key, weight in weights.items()}
    save_file(halves | {key: torch.zeros(shapes[key], dtype=torch.float16) for key in idle}, file)


def is_idle(key: str) -> bool:
    """Whether the key belongs to an encoder layer of zeros."""
    return key.startswith(ENCODER) and not key.startswith(f"{ENCODER}0.")


def sd15() -> Keys:
    yield from _unet()
    for key, shape in autoencoder(svd_layout.REAL, temporal=False):
        yield VAE + key, shape
    yield from conv(f"{VAE}quant_conv", 8, 8, 1, 1)
    yield from conv(f"{VAE}post_quant_conv", 4, 4, 1, 1)
    yield from _text_encoder()


def _unet() -> Keys:
    """SD1.5's UNet with one level of one block instead of four levels of two."""
    yield from conv(f"{UNET}time_embed.0", EMBEDDED, WIDTH)
    yield from conv(f"{UNET}time_embed.2", EMBEDDED, EMBEDDED)
    yield from conv(f"{UNET}input_blocks.0.0", WIDTH, 4, 3, 3)
    yield from _block(f"{UNET}input_blocks.1", WIDTH)
    yield from _block(f"{UNET}middle_block", WIDTH)
    yield from resblock(f"{UNET}middle_block.2", WIDTH, WIDTH, EMBEDDED, (3, 3))
    yield from _block(f"{UNET}output_blocks.0", 2 * WIDTH)
    yield from _block(f"{UNET}output_blocks.1", 2 * WIDTH)
    yield from norm(f"{UNET}out.0", WIDTH)
    yield from conv(f"{UNET}out.2", 4, WIDTH, 3, 3)


def _block(name: str, of: int) -> Keys:
    yield from resblock(f"{name}.0", of, WIDTH, EMBEDDED, (3, 3))
    yield from norm(f"{name}.1.norm", WIDTH)
    yield from conv(f"{name}.1.proj_in", WIDTH, WIDTH, 1, 1)
    yield from transformer(f"{name}.1.transformer_blocks.0", WIDTH, CONTEXT, feeds_in=False)
    yield from conv(f"{name}.1.proj_out", WIDTH, WIDTH, 1, 1)


def _text_encoder() -> Keys:
    yield f"{TEXT}embeddings.token_embedding.weight", (TOKENS, CONTEXT)
    yield f"{TEXT}embeddings.position_embedding.weight", (LENGTH, CONTEXT)
    for i in range(LAYERS):
        layer = f"{TEXT}encoder.layers.{i}."
        yield from norm(f"{layer}layer_norm1", CONTEXT)
        yield from norm(f"{layer}layer_norm2", CONTEXT)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from conv(f"{layer}self_attn.{part}", CONTEXT, CONTEXT)
        yield from conv(f"{layer}mlp.fc1", 4 * CONTEXT, CONTEXT)
        yield from conv(f"{layer}mlp.fc2", CONTEXT, 4 * CONTEXT)
    yield from norm(f"{TEXT}final_layer_norm", CONTEXT)
