"""Families that make pictures."""

from __future__ import annotations

from native_layouts import Layout

UNET = {
    "image_size": 32,
    "out_channels": 4,
    "model_channels": 32,
    "num_res_blocks": [1, 1],
    "channel_mult": [1, 2],
    "transformer_depth": [1, 1],
    "transformer_depth_output": [1, 1, 1, 1],
    "transformer_depth_middle": 1,
    "use_spatial_transformer": True,
    "legacy": False,
    "context_dim": 24,
}
SDXL = UNET | {
    "in_channels": 4,
    "adm_in_channels": 2816,
    "use_linear_in_transformer": True,
    "num_classes": "sequential",
    "model_channels": 64,  # a head has as many
}
FLUX = {
    "in_channels": 16,
    "out_channels": 16,
    "patch_size": 2,
    "vec_in_dim": 24,
    "context_in_dim": 32,
    "hidden_size": 48,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "depth_single_blocks": 2,
    "axes_dim": [8, 8, 8],
    "guidance_embed": False,
}
FLUX_2 = FLUX | {
    "in_channels": 128,
    "out_channels": 128,
    "patch_size": 1,
    "vec_in_dim": None,
    "hidden_size": 64,
    "axes_dim": [8, 8, 8, 8],
    "guidance_embed": True,
}
QWEN_IMAGE = {
    "in_channels": 64,
    "num_layers": 2,
    "attention_head_dim": 24,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 8, 8),
}
LUMINA2 = {
    "in_channels": 16,
    "dim": 48,  # 2 heads of 24
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 1,
    "multiple_of": 16,
    "ffn_dim_multiplier": 1.0,
    "cap_feat_dim": 32,
    "axes_dims": [8, 8, 8],
    "axes_lens": [64, 64, 64],
}
Z_IMAGE = LUMINA2 | {
    "dim": 256,  # its modulation has as many, at least
    "n_kv_heads": 2,
    "axes_dims": [32, 48, 48],
}
LUMINA2_MARK = "noise_refiner.0.attention.k_norm.weight"

IMAGE_LAYOUTS = {
    "sd15": Layout(
        "SD15",
        UNET | {"in_channels": 4, "adm_in_channels": None, "use_linear_in_transformer": False},
        latents=(1, 4, 8, 8),
        context=(1, 7, 24),
        hot={"input_blocks.1.0.in_layers.2.weight": 1e5},
    ),
    "sdxl": Layout(
        "SDXL",
        SDXL,
        latents=(1, 4, 8, 8),
        context=(1, 7, 24),
        hot={"input_blocks.1.0.in_layers.2.weight": 1e5},
        extra={"pooled_output": (1, 1280)},
    ),
    "flux": Layout(
        "FluxSchnell",
        FLUX,
        latents=(1, 16, 8, 8),
        context=(1, 7, 32),
        hot={"double_blocks.0.txt_mlp.2.weight": 8e4},
        marks={"img_in.weight": (48, 64), "double_blocks.0.img_attn.norm.key_norm.scale": (24,)},
        cfg=1.0,
        extra={"pooled_output": (1, 24)},
    ),
    "flux2": Layout(
        "Flux2",
        FLUX_2,
        latents=(1, 128, 4, 4),
        context=(1, 7, 32),
        hot={"double_blocks.0.img_mlp.2.weight": 8e4},
        marks={
            "img_in.weight": (64, 128),
            "double_blocks.0.img_attn.norm.key_norm.scale": (32,),
            "double_stream_modulation_img.lin.weight": (384, 64),
        },
        cfg=1.0,
    ),
    "qwen_image": Layout(
        "QwenImage",
        QWEN_IMAGE,
        latents=(1, 16, 1, 8, 8),
        context=(1, 7, 32),
        hot={"transformer_blocks.0.img_mlp.net.0.proj.weight": 1e5},
        marks={"txt_norm.weight": (32,)},
    ),
    "lumina2": Layout(
        "Lumina2",
        LUMINA2,
        latents=(1, 16, 8, 8),
        context=(1, 7, 32),
        hot={"layers.0.feed_forward.w3.weight": 6e4},
        marks={"cap_embedder.1.weight": (2304, 32), LUMINA2_MARK: (24,)},
        ones={"attention_mask": (1, 7)},
    ),
    "z_image": Layout(
        "ZImage",
        Z_IMAGE,
        latents=(1, 16, 8, 8),
        context=(1, 7, 32),
        hot={"layers.0.feed_forward.w3.weight": 6e4},
        marks={"cap_embedder.1.weight": (3840, 32), LUMINA2_MARK: (128,), "cap_pad_token": (1, 3840)},
        ones={"attention_mask": (1, 7)},
    ),
}
