"""The families of ComfyUI's own models that the tests run, each as small as possible.

Only ComfyUI's interpreter imports this module, after its options have been read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """A family: its network's inputs and sizes, and a layer that can make fp16 overflow, but not fp32."""

    config: str  # its class in comfy.supported_models
    sizes: Mapping[str, Any]  # of the network, replacing those that ComfyUI detects
    latents: Shape
    hot: str  # the layer
    times: float = 1e5  # factor for its weight
    context: Shape = (1, 7, 32)
    marks: Mapping[str, Shape] = field(default_factory=dict)  # weights by which ComfyUI detects it
    not_in_fp8: tuple[str, ...] = ()  # suffixes of weights that ComfyUI does not accept in fp8
    sound: Shape | None = None  # latents of sound, if the family makes pictures and sound
    cfg: float = 4.0
    scheduler: str = "simple"
    extra: Mapping[str, Any] = field(default_factory=dict)  # further conditions: shapes, also in lists, or values
    ones: Mapping[str, Shape] = field(default_factory=dict)  # integer conditions: masks, tokens
    once: str = ""  # a part that each call runs once, if it runs the block more often
    rounds: float = 1e-5  # error bound of a rerun, whose inputs were prepared in half precision before the first call

    @property
    def streams(self) -> tuple[Shape, ...]:
        """Shapes of the latents, pictures first."""
        return (self.latents, self.sound) if self.sound else (self.latents,)

    @property
    def heat(self) -> dict[str, float]:
        """{the weight that makes it overflow: its factor}"""
        return {f"{self.hot}.weight": self.times}

    @property
    def block(self) -> str:
        """The name of the network's block that overflows."""
        parts = self.hot.split(".")
        numbered = next(place for place, part in enumerate(parts) if part.isdigit())
        return ".".join(parts[: numbered + (2 if parts[0] == "input_blocks" else 1)])

    def split(self, made: torch.Tensor) -> list[torch.Tensor]:
        """Split concatenated latents into their streams."""
        if len(self.streams) == 1:
            return [made]
        parts = made.split([math.prod(shape) for shape in self.streams])
        return [part.reshape(shape) for part, shape in zip(parts, self.streams, strict=True)]

    def settings(self) -> dict[str, Any]:
        """Return the network's settings: ComfyUI's detection of a checkpoint, with our sizes. So parameters that newer
        ComfyUIs add have ComfyUI's values."""
        detect = import_module("comfy.model_detection").detect_unet_config
        return {**(detect(self.checkpoint(), "") or {}), **self.sizes}

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Return the weights by which ComfyUI detects the family, and those outside its network."""
        return _Checkpoint({name: torch.full(shape, 0.1) for name, shape in self.marks.items()})


class _Checkpoint(dict[str, torch.Tensor]):
    """Weights by which a family is detected. Any other weight has one value: our sizes replace the detected ones."""

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.zeros((1,) * 5)


def sizes(**given: Any) -> dict[str, Any]:
    """Return the arguments of a network's class."""
    return given


UNET = sizes(image_size=32, out_channels=4, model_channels=32, num_res_blocks=[1, 1], channel_mult=[1, 2])
UNET |= sizes(transformer_depth=[1, 1], transformer_depth_output=[1, 1, 1, 1], transformer_depth_middle=1)
UNET |= sizes(use_spatial_transformer=True, legacy=False, context_dim=24)
CONDITIONED = sizes(use_linear_in_transformer=True, num_classes="sequential", model_channels=64)  # = channels of a head
SDXL = UNET | CONDITIONED | sizes(in_channels=4, adm_in_channels=2816)
SVD = UNET | CONDITIONED | sizes(in_channels=8, adm_in_channels=768, channel_mult=[1, 1], video_kernel_size=[3, 1, 1])
SVD |= sizes(use_temporal_resblock=True, use_temporal_attention=True, extra_ff_mix_layer=True)
SVD |= sizes(use_spatial_context=True, merge_strategy="learned_with_images", merge_factor=0.0)

STREAMS = sizes(context_in_dim=32, hidden_size=48, mlp_ratio=2.0, num_heads=2, axes_dim=[8, 8, 8])
STREAMS |= sizes(depth=2, depth_single_blocks=2)
FLUX = STREAMS | sizes(in_channels=16, out_channels=16, patch_size=2, vec_in_dim=24, guidance_embed=False)
FLUX_2 = STREAMS | sizes(in_channels=128, out_channels=128, patch_size=1, vec_in_dim=None, guidance_embed=True)
FLUX_2 |= sizes(hidden_size=64, axes_dim=[8, 8, 8, 8])
CHROMA = STREAMS | sizes(in_channels=64, out_channels=64, out_dim=48, hidden_dim=64, n_layers=2)  # values of a patch
HUNYUAN_VIDEO = STREAMS | sizes(in_channels=16, out_channels=16, patch_size=[1, 2, 2], vec_in_dim=24)
HUNYUAN_VIDEO_15 = STREAMS | sizes(out_channels=32, patch_size=[1, 1, 1], vec_in_dim=None, vision_in_dim=24, byt5=False)
HUNYUAN_VIDEO_15 |= sizes(in_channels=65)  # latents, latents of a first picture, and its mask

BLOCKS = sizes(num_attention_heads=2, num_layers=2)
QWEN_IMAGE = BLOCKS | sizes(in_channels=64, attention_head_dim=24, joint_attention_dim=32, axes_dims_rope=(8, 8, 8))
ERNIE = BLOCKS | sizes(hidden_size=64, ffn_hidden_size=128, text_in_dim=32, rope_axes_dim=(8, 12, 12))
IDEOGRAM4 = BLOCKS | sizes(in_channels=128, attention_head_dim=32, intermediate_size=128, adaln_dim=16)
IDEOGRAM4 |= sizes(llm_features_dim=32, mrope_section=[6, 5, 5])
COGVIDEOX = BLOCKS | sizes(attention_head_dim=64, in_channels=16, time_embed_dim=32, text_embed_dim=32, patch_size=2)
LTXV = BLOCKS | sizes(attention_head_dim=24, cross_attention_dim=48, caption_channels=32)
LTXAV = LTXV | sizes(audio_num_attention_heads=2, audio_attention_head_dim=12, audio_cross_attention_dim=24)
LTXAV |= sizes(connector_attention_head_dim=16, connector_num_attention_heads=2, connector_num_layers=1)
MINIMAX_H3 = BLOCKS | sizes(hidden_size=48, token_refiner_num_layers=1, attention_head_dim=32, ffn_hidden_size=64)
MINIMAX_H3 |= sizes(latents_dim=24, audio_latents_dim=32, text_dim=40, timestep_input_dim=32, time_embed_dim=24)
MINIMAX_H3 |= sizes(time_embed_hidden_size=48, rope_inv_freq_len=4)  # × 3 axes × 2: 24 of a head's 32
ACE = BLOCKS | sizes(attention_head_dim=24, inner_dim=48, text_embedding_dim=32, lyric_encoder_vocab_size=16)
ACE |= sizes(lyric_hidden_size=32, ssl_latent_dims=[16, 16])

LUMINA2 = sizes(in_channels=16, dim=48, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=1, multiple_of=16)
LUMINA2 |= sizes(ffn_dim_multiplier=1.0, cap_feat_dim=32, axes_dims=[8, 8, 8], axes_lens=[64, 64, 64])
Z_IMAGE = LUMINA2 | sizes(dim=256, n_kv_heads=2, axes_dims=[32, 48, 48])  # dim: the minimum for its modulation
KREA2 = sizes(features=64, tdim=32, txtdim=16, heads=4, kvheads=2, multiplier=2, layers=2, channels=16)
KREA2 |= sizes(txtlayers=2, txtheads=2, txtkvheads=2)
COSMOS = sizes(in_channels=16, model_channels=64, num_blocks=2, num_heads=2, crossattn_emb_channels=32)
COSMOS |= sizes(adaln_lora_dim=16, extra_per_block_abs_pos_emb=False)
TEXT = sizes(vocab_size=151700, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
TEXT |= sizes(num_key_value_heads=2, head_dim=32, rope_dims=[4, 6, 6])
VISION = sizes(hidden_size=32, num_heads=2, intermediate_size=48, depth=1, deepstack_visual_indexes=())
HIDREAM_O1 = sizes(text_config_overrides=TEXT, vision_config_overrides=VISION)
# Wan: 2 heads of 48 channels: 16 for time, 16 for height, 16 for width
WAN = sizes(dim=96, in_dim=16, out_dim=16, ffn_dim=128, freq_dim=32, text_dim=32, num_heads=2, num_layers=2)
KANDINSKY5 = sizes(in_text_dim=32, in_text_dim2=24, time_dim=32, model_dim=48, ff_dim=96, axes_dims=(8, 8, 8))
KANDINSKY5 |= sizes(num_text_blocks=1, num_visual_blocks=2)
KANDINSKY5 |= sizes(visual_embed_dim=132)  # a patch: latents, latents of a first picture, and its mask
SEEDVR2 = sizes(vid_dim=48, txt_in_dim=32, heads=2, head_dim=24, num_layers=2, mm_layers=1, rope_dim=24)

FLUX_MARKS = {"img_in.weight": (48, 64), "double_blocks.0.img_attn.norm.key_norm.scale": (24,)}
FLUX_2_MARKS = {"img_in.weight": (64, 128), "double_blocks.0.img_attn.norm.key_norm.scale": (32,)}
FLUX_2_MARKS |= {"double_stream_modulation_img.lin.weight": (384, 64)}
LUMINA2_MARK = "noise_refiner.0.attention.k_norm.weight"
LUMINA2_MARKS = {"cap_embedder.1.weight": (2304, 32), LUMINA2_MARK: (24,)}
Z_IMAGE_MARKS = {"cap_embedder.1.weight": (3840, 32), LUMINA2_MARK: (128,), "cap_pad_token": (1, 3840)}
COSMOS_MARKS = {"blocks.0.mlp.layer1.weight": (256, 64)}
ANIMA_MARKS = COSMOS_MARKS | {"llm_adapter.blocks.0.cross_attn.q_proj.weight": (32, 32)}
HIDREAM_O1_MARKS = {"t_embedder1.mlp.0.weight": (64, 256), "x_embedder.proj1.weight": (16, 3072)}
LTXV_MARKS = {"adaln_single.emb.timestep_embedder.linear_1.bias": (48,)}
WAN_MARKS = {"head.modulation": (1, 2, 96)}
HUNYUAN_VIDEO_MARK = {"txt_in.individual_token_refiner.blocks.0.norm1.weight": (48,)}
HUNYUAN_VIDEO_MARKS = HUNYUAN_VIDEO_MARK | {"img_in.proj.weight": (48, 16, 1, 2, 2)}
HUNYUAN_VIDEO_MARKS |= {"vector_in.in_layer.weight": (48, 24), "guidance_in.in_layer.weight": (48, 256)}
HUNYUAN_VIDEO_15_MARKS = HUNYUAN_VIDEO_MARK | {"img_in.proj.weight": (48, 65, 1, 1, 1)}
HUNYUAN_VIDEO_15_MARKS |= {"cond_type_embedding.weight": (3, 48), "vision_in.proj.0.weight": (24,)}
UNET_HOT, STREAMS_HOT = "input_blocks.1.0.in_layers.2", "double_blocks.0.txt_mlp.2"
QWEN_HOT, LTXV_HOT = "transformer_blocks.0.img_mlp.net.0.proj", "transformer_blocks.0.ff.net.0.proj"
MASK, POOLED, TOKENS = {"attention_mask": (1, 7)}, {"pooled_output": (1, 24)}, {"text_input_ids": (1, 7)}

SD15 = UNET | sizes(in_channels=4, adm_in_channels=None, use_linear_in_transformer=False)
IMAGE_LAYOUTS = {
    "sd15": Layout("SD15", SD15, (1, 4, 8, 8), UNET_HOT, context=(1, 7, 24)),
    "sdxl": Layout("SDXL", SDXL, (1, 4, 8, 8), UNET_HOT, context=(1, 7, 24), extra={"pooled_output": (1, 1280)}),
    "flux": Layout("FluxSchnell", FLUX, (1, 16, 8, 8), STREAMS_HOT, 8e4, marks=FLUX_MARKS, cfg=1.0, extra=POOLED),
    "flux2": Layout("Flux2", FLUX_2, (1, 128, 4, 4), "double_blocks.0.img_mlp.2", 8e4, marks=FLUX_2_MARKS, cfg=1.0),
    "qwen_image": Layout("QwenImage", QWEN_IMAGE, (1, 16, 1, 8, 8), QWEN_HOT, marks={"txt_norm.weight": (32,)}),
    "lumina2": Layout(
        "Lumina2", LUMINA2, (1, 16, 8, 8), "layers.0.feed_forward.w3", 6e4, marks=LUMINA2_MARKS, ones=MASK
    ),
    "z_image": Layout(
        "ZImage", Z_IMAGE, (1, 16, 8, 8), "layers.0.feed_forward.w3", 6e4, marks=Z_IMAGE_MARKS, ones=MASK
    ),
    "chroma": Layout(  # an older ComfyUI requires a pooled prompt, but ignores it
        "Chroma",
        CHROMA,
        (1, 16, 8, 8),
        STREAMS_HOT,
        8e4,
        marks=FLUX_MARKS | {"distilled_guidance_layer.0.norms.0.scale": (64,)},
        ones=POOLED,
    ),
    "krea2": Layout(  # context: outputs of two layers
        "Krea2", KREA2, (1, 16, 1, 8, 8), "blocks.0.mlp.up", marks={"txtfusion.projector.weight": (1, 2)}
    ),
    "anima": Layout(  # context: refined before the network gets it
        "Anima", COSMOS, (1, 16, 1, 8, 8), "blocks.0.mlp.layer1", marks=ANIMA_MARKS
    ),
    "cosmos_predict2": Layout("CosmosT2IPredict2", COSMOS, (1, 16, 1, 8, 8), "blocks.0.mlp.layer1", marks=COSMOS_MARKS),
    "ernie_image": Layout(
        "ErnieImage", ERNIE, (1, 128, 4, 4), "layers.0.mlp.up_proj", marks={"layers.0.mlp.linear_fc2.weight": (64, 128)}
    ),
    "ideogram4": Layout(
        "Ideogram4",
        IDEOGRAM4,
        (1, 128, 4, 4),
        "layers.0.feed_forward.w3",
        6e4,
        marks={"embed_image_indicator.weight": (2, 64)},
    ),
    "mage_flow": Layout(
        "MageFlow",
        QWEN_IMAGE | sizes(in_channels=128),
        (1, 128, 4, 4),
        QWEN_HOT,
        marks={"txt_norm.weight": (2560,), "proj_out.weight": (128, 48)},
    ),
    "hidream_o1": Layout(
        "HiDreamO1",
        HIDREAM_O1,
        (1, 3, 64, 64),
        "language_model.layers.0.mlp.up_proj",
        8e4,
        context=(1, 7, 64),
        marks=HIDREAM_O1_MARKS,
        ones=TOKENS,
    ),
    "qwen_image21": Layout(
        "SmallQwenImage21",
        sizes(in_channels=16, dim=48, num_layers=3, heads=2, context_dim=32),
        (1, 16, 4, 4),
        "transformer_blocks.0.gate_up",
        once="proj_out",  # the block also makes a prompt's keys and values
    ),
    "sensenova": Layout(
        "SmallSenseNovaU15",
        sizes(dim=64, num_layers=2, heads=2, tokens=16),
        (1, 3, 8, 8),
        "layers.0.up_proj",
        not_in_fp8=("embed_tokens.weight",),
        rounds=1e-3,
        ones=TOKENS,
    ),
}
VIDEO_LAYOUTS = {
    "svd": Layout(
        "SVD_img2vid",
        SVD,
        (2, 4, 4, 4),
        UNET_HOT,
        context=(1, 1, 24),
        scheduler="karras",
        extra={"concat_latent_image": (1, 4, 4, 4)},
    ),
    "wan": Layout("WAN21_T2V", WAN, (1, 16, 2, 8, 8), "blocks.0.ffn.0", marks=WAN_MARKS),
    "wan22": Layout(
        "WAN22_T2V", WAN | sizes(in_dim=48, out_dim=48), (1, 48, 2, 4, 4), "blocks.0.ffn.0", marks=WAN_MARKS
    ),
    "cogvideox": Layout(
        "CogVideoX_T2V",
        COGVIDEOX,
        (1, 16, 2, 8, 8),
        "blocks.0.ff_proj",
        marks={"blocks.0.norm1.linear.weight": (768, 32)},
    ),
    "ltxv": Layout("LTXV", LTXV, (1, 128, 2, 4, 4), LTXV_HOT, marks=LTXV_MARKS, ones=MASK),
    "ltx2": Layout(
        "LTXAV",
        LTXAV,
        (1, 128, 2, 4, 4),
        LTXV_HOT,
        sound=(1, 8, 6, 16),
        context=(1, 7, 64),  # refined before the network gets it, for pictures and for sound
        marks=LTXV_MARKS | {"audio_adaln_single.linear.weight": (144, 24)},
        ones=MASK,
    ),
    "hunyuan_video": Layout(
        "HunyuanVideo",
        HUNYUAN_VIDEO,
        (1, 16, 2, 8, 8),
        STREAMS_HOT,
        8e4,
        marks=HUNYUAN_VIDEO_MARKS,
        cfg=1.0,
        extra=POOLED,
    ),
    "hunyuan_video_15": Layout(
        "HunyuanVideo15",
        HUNYUAN_VIDEO_15,
        (1, 32, 2, 4, 4),
        STREAMS_HOT,
        8e4,
        marks=HUNYUAN_VIDEO_15_MARKS,
        extra=POOLED,
    ),
    "minimax_h3": Layout(
        "MiniMaxH3",
        MINIMAX_H3,
        (1, 24, 2, 4, 4),
        "blocks.0.mlp.fc1",
        3e4,
        sound=(1, 32, 2, 8),
        context=(1, 7, 48),  # refined before the network gets it
        marks={"video_patch_proj.weight": (48, 96), "audio_patch_proj.weight": (48, 32)},
        not_in_fp8=("q_norm.weight", "k_norm.weight"),
        cfg=1.0,  # it takes one prompt at a time
    ),
    "kandinsky5": Layout(
        "Kandinsky5",
        KANDINSKY5,
        (1, 16, 2, 8, 8),
        "visual_transformer_blocks.0.feed_forward.in_layer",
        marks={"visual_transformer_blocks.0.cross_attention.key_norm.weight": (24,)},
        extra=POOLED,
    ),
    "seedvr2": Layout(
        "SeedVR2",
        SEEDVR2,
        (1, 16, 2, 8, 8),
        "blocks.0.mlp.vid.proj_in",
        marks={"blocks.31.mlp.all.proj_in_gate.weight": (256, 48)},
        extra={"condition": (1, 17, 2, 8, 8)},
    ),
    "ace": Layout(
        "ACEStep",
        ACE,
        (1, 8, 16, 8),
        "transformer_blocks.0.attn.to_out.0",
        9e4,
        marks={"genre_embedder.weight": (48, 32)},
        ones={"conditioning_lyrics": (1, 5)},
    ),
}
VIDEO_LAYOUTS["ltx2_sound"] = replace(  # overflows only in the sound layers
    VIDEO_LAYOUTS["ltx2"], hot="transformer_blocks.1.audio_ff.net.0.proj", times=3e4
)
