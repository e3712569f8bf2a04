"""More families of ComfyUI's own image models, as small as possible.

Only ComfyUI's interpreter imports this module, after its options have been read.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from native_layouts import (
    BLOCKS,
    CHROMA,
    FLUX,
    FLUX_MARKS,
    HUNYUAN_VIDEO_MARK,
    IMAGE_LAYOUTS,
    MASK,
    POOLED,
    SD15,
    SDXL,
    STREAMS,
    STREAMS_HOT,
    Layout,
    sizes,
)

SD, XL = IMAGE_LAYOUTS["sd15"], IMAGE_LAYOUTS["sdxl"]
SD3 = sizes(in_channels=16, out_channels=16, patch_size=2, depth=2, input_size=None, adm_in_channels=24, num_patches=64)
SD3 |= sizes(pos_embed_max_size=8, pos_embed_scaling_factor=None, qk_norm="rms", x_block_self_attn_layers=[0])
SD3 |= sizes(context_embedder_config={"target": "torch.nn.Linear", "params": {"in_features": 32, "out_features": 128}})
AURA = sizes(in_channels=4, out_channels=4, dim=96, n_layers=2, n_double_layers=1, n_heads=2, global_conddim=96)
AURA |= sizes(cond_seq_dim=32, max_seq=64)
PIXART = sizes(input_size=8, hidden_size=96, depth=2, num_heads=2, mlp_ratio=2.0, caption_channels=32)
PIXART |= sizes(model_max_length=7, micro_condition=False)
HYDIT = sizes(hidden_size=96, depth=2, num_heads=2, mlp_ratio=2.0, text_states_dim=32, text_states_dim_t5=24)
HYDIT |= sizes(text_len=7, text_len_t5=5)
STAGE_C = sizes(c_cond=32, c_hidden=[64, 64], nhead=[2, 2], blocks=[[1, 1], [1, 1]], c_clip_text=32)
STAGE_C |= sizes(c_clip_text_pooled=24, stable_cascade_stage="c")
STAGE_B = sizes(c_hidden=[32, 32, 64, 64], nhead=[-1, -1, 2, 2], blocks=[[1] * 4] * 2, block_repeat=[[1] * 4] * 2)
STAGE_B |= sizes(c_cond=32, c_clip=24, stable_cascade_stage="b")
HIDREAM = sizes(patch_size=2, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=32)
HIDREAM |= sizes(num_attention_heads=2, caption_channels=[32, 40], text_emb_dim=24, axes_dims_rope=(8, 12, 12))
HIDREAM |= sizes(max_resolution=(16, 16), llama_layers=[0, 1])
OMNIGEN2 = sizes(hidden_size=48, num_layers=2, num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1)
OMNIGEN2 |= sizes(multiple_of=16, axes_dim_rope=(8, 8, 8), axes_lens=(64, 64, 64))
PIXELDIT = sizes(num_groups=2, hidden_size=64, pixel_attn_hidden_size=64, pixel_num_groups=2, patch_depth=2)
PIXELDIT |= sizes(pixel_depth=1, patch_size=8, txt_embed_dim=32, txt_max_length=7)
LENS = BLOCKS | sizes(attention_head_dim=24, enc_hidden_dim=16, axes_dims_rope=(8, 8, 8), selected_layer_index=(0, 1))
JOY = BLOCKS | sizes(hidden_size=48, text_dim=32, mlp_width_ratio=2.0, rope_dim_list=[8, 8, 8])
HUNYUAN3D = sizes(in_channels=16, context_in_dim=32, hidden_size=64, mlp_ratio=2.0, num_heads=2, depth=2)
HUNYUAN3D |= sizes(depth_single_blocks=2)
HUNYUAN3D_21 = sizes(in_channels=16, hidden_size=64, context_dim=32, depth=3, num_heads=2, num_moe_layers=1)
HUNYUAN3D_21 |= sizes(guidance_cond_proj_dim=None, num_experts=4)
RADIANCE = CHROMA | sizes(in_channels=3, out_channels=3, patch_size=4, nerf_hidden_size=16, nerf_mlp_ratio=2)
RADIANCE |= sizes(nerf_depth=2, nerf_max_freqs=4, nerf_tile_size=0, nerf_final_head_type="conv")
RADIANCE |= sizes(nerf_embedder_dtype=torch.float32)
RADIANCE_MARKS = FLUX_MARKS | {"distilled_guidance_layer.0.norms.0.scale": (64,), "nerf_blocks.0.norm.scale": (16,)}
RADIANCE_MARKS |= {"img_in_patch.weight": (48, 3, 4, 4), "nerf_final_layer_conv.norm.scale": (16,)}
HUNYUAN_IMAGE = STREAMS | sizes(in_channels=64, out_channels=64, patch_size=[1, 1], axes_dim=[12, 12], vec_in_dim=None)
HUNYUAN_IMAGE |= sizes(byt5=False, guidance_embed=False, meanflow=False)
PICTURE = {"concat_latent_image": (1, 4, 8, 8)}
REFERENCE, FRAMES = {"reference_latents": [(1, 16, 8, 8)]}, {"reference_latents": [(1, 16, 1, 8, 8)]}
CASCADE_HOT = "down_blocks.0.0.channelwise.0"
CASCADE = Layout("Stable_Cascade_C", STAGE_C, (1, 16, 8, 8), CASCADE_HOT, extra=POOLED, once="down_blocks.0.0")

FURTHER_IMAGE_LAYOUTS = {
    "sd21": replace(SD, config="SD20", sizes=SD15 | sizes(model_channels=64)),
    "lotus": replace(SD, config="LotusD", sizes=SDXL | sizes(adm_in_channels=4)),
    "instruct": replace(SD, config="SD15_instructpix2pix", sizes=SD15 | sizes(in_channels=8), extra=PICTURE),
    "refiner": replace(XL, config="SDXLRefiner", sizes=SDXL | sizes(adm_in_channels=2560)),
    "kontext": replace(IMAGE_LAYOUTS["flux"], extra=POOLED | REFERENCE),
    "flux2_edit": replace(IMAGE_LAYOUTS["flux2"], extra={"reference_latents": [(1, 128, 4, 4)]}),
    "qwen_image_edit": replace(IMAGE_LAYOUTS["qwen_image"], extra=FRAMES),
    "mage_flow_edit": replace(IMAGE_LAYOUTS["mage_flow"], extra={"reference_latents": [(1, 128, 4, 4)]}),
    "krea2_edit": replace(IMAGE_LAYOUTS["krea2"], extra=FRAMES),
    "z_image_omni": replace(IMAGE_LAYOUTS["z_image"], extra=REFERENCE),
    "sd3": Layout("SD3", SD3, (1, 16, 8, 8), "joint_blocks.0.x_block.mlp.fc1", extra=POOLED),
    "aura": Layout("AuraFlow", AURA, (1, 4, 8, 8), "single_layers.0.mlp.c_fc1"),
    "pixart": Layout("PixArtSigma", PIXART, (1, 4, 48, 24), "blocks.0.mlp.fc1"),
    "hydit": Layout(
        "HunyuanDiT1",
        HYDIT,
        (1, 4, 8, 8),
        "blocks.0.mlp.fc1",
        extra={"conditioning_mt5xl": (1, 5, 24)},
        ones=MASK | {"attention_mask_mt5xl": (1, 5)},
    ),
    "cascade_c": CASCADE,
    "cascade_b": replace(CASCADE, config="Stable_Cascade_B", sizes=STAGE_B, latents=(1, 4, 32, 32)),
    "hidream": Layout(
        "HiDream",
        HIDREAM,
        (1, 16, 8, 8),
        "double_stream_blocks.0.block.ff_i.shared_experts.w1",
        extra=POOLED | {"conditioning_llama3": (1, 2, 7, 40)},
    ),
    "omnigen2": Layout(
        "Omnigen2",
        OMNIGEN2 | sizes(text_feat_dim=32),
        (1, 16, 8, 8),
        "layers.0.feed_forward.linear_1",
        ones=MASK,
        extra=REFERENCE,
    ),
    "boogu": Layout(
        "Boogu",
        OMNIGEN2 | sizes(instruction_feat_dim=32, num_double_stream_layers=1),
        (1, 16, 8, 8),
        "single_stream_layers.0.feed_forward.linear_1",
        ones=MASK,
        extra=REFERENCE,
    ),
    "radiance": Layout("ChromaRadiance", RADIANCE, (1, 3, 16, 16), STREAMS_HOT, marks=RADIANCE_MARKS),
    "pixeldit": Layout("PixelDiTT2I", PIXELDIT, (1, 3, 32, 32), "patch_blocks.0.mlp_x.w1", ones=MASK),
    "lens": Layout("Lens", LENS, (1, 128, 4, 4), "transformer_blocks.0.img_mlp.w1", ones=MASK),
    "joyimage": Layout("JoyImage", JOY, (1, 16, 1, 8, 8), "double_blocks.0.img_mlp.net.0.proj", extra=FRAMES),
    "longcat": Layout("LongCatImage", FLUX | sizes(vec_in_dim=None), (1, 16, 8, 8), STREAMS_HOT, marks=FLUX_MARKS),
    "hunyuan_image": Layout(
        "HunyuanImage21",
        HUNYUAN_IMAGE,
        (1, 64, 4, 4),
        STREAMS_HOT,
        marks=HUNYUAN_VIDEO_MARK | {"img_in.proj.weight": (48, 64, 1, 1)},
        ones=MASK,
    ),
    "hunyuan3d": Layout("Hunyuan3Dv2", HUNYUAN3D, (1, 16, 24), "double_blocks.0.img_mlp.2"),
    "hunyuan3d_21": Layout("Hunyuan3Dv2_1", HUNYUAN3D_21, (1, 16, 24), "blocks.0.mlp.fc1"),
}
