"""Further video and sound families of ComfyUI's own models, with the conditions that only they read: first pictures,
masks, references, poses, faces, cameras and sounds.

Only ComfyUI's interpreter imports this module, after its options have been read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from native_layouts import COSMOS, COSMOS_MARKS, MASK, VIDEO_LAYOUTS, WAN, WAN_MARKS, Layout, Shape, sizes
from native_models import SUPPORTED

COGVIDEOX, HUNYUAN_VIDEO, HUNYUAN_VIDEO_15, KANDINSKY5 = (
    VIDEO_LAYOUTS[name] for name in ("cogvideox", "hunyuan_video", "hunyuan_video_15", "kandinsky5")
)
FRAMES: Shape = (1, 16, 2, 8, 8)
PICTURE: Shape = (1, 16, 1, 8, 8)
SEEN: dict[str, Any] = {"penultimate_hidden_states": (1, 5, 1280)}  # by CLIP vision
SEEN_15: dict[str, Any] = {"clip_vision_output": {"last_hidden_state": (1, 5, 24)}}
VISION, REFERENCE = {"clip_vision_output": SEEN}, {"reference_latents": [PICTURE]}
FIRST: dict[str, Any] = {"concat_latent_image": FRAMES, "concat_mask": (1, 1, 2, 8, 8)}
CAMERA = {"camera_conditions": (1, 24, 2, 64, 64)}
AUDIO_PROJECTION = {"channels": 8, "intermediate_dim": 16}  # of HuMo; 1280 and 512 in full

SOUND_MARKS = {"transformer.rotary_pos_emb.inv_freq": (16,)}
SECONDS = "conditioner.conditioners.seconds_{}.embedder.embedding.{}"
NUMBER_LEARNED = {"0.weights": (128,), "1.weight": (768, 257), "1.bias": (768,)}
NUMBER_FIXED = {"1.weight": (768, 256), "1.bias": (768,)}
STABLE_AUDIO_MARKS: dict[str, Shape] = SOUND_MARKS | {
    "to_global_embed.0.weight": (128, 1536),
    "to_cond_embed.0.weight": (128, 768),
    "postprocess_conv.weight": (64, 64, 1),
    "transformer.project_in.weight": (128, 64),
}
STABLE_AUDIO_MARKS |= {
    SECONDS.format(end, name): NUMBER_LEARNED[name] for end in ("start", "total") for name in NUMBER_LEARNED
}
STABLE_AUDIO_3_MARKS: dict[str, Shape] = SOUND_MARKS | {
    "to_global_embed.0.weight": (128, 768),
    "to_cond_embed.0.weight": (128, 768),
    "to_timestep_embed.0.weight": (128, 256),
    "postprocess_conv.weight": (256, 256, 1),
    "transformer.project_in.weight": (128, 256),
    "transformer.memory_tokens": (4, 128),
    "transformer.global_cond_embedder.0.weight": (128, 128),
    "transformer.layers.0.self_attn.q_norm.gamma": (64,),
    "transformer.layers.0.self_attn.to_qkv.weight": (640, 128),
    "transformer.layers.0.to_local_embed.0.weight": (128, 257),
    "conditioner.conditioners.prompt.padding_embedding": (768,),
}
STABLE_AUDIO_3_MARKS |= {SECONDS.format("total", name): shape for name, shape in NUMBER_FIXED.items()}
ACE_15 = sizes(hidden_size=64, text_hidden_dim=32, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=96)
ACE_15 |= sizes(num_dit_layers=2, num_lyric_layers=1, num_timbre_layers=1, num_tokenizer_layers=1, fsq_dim=64)
ACE_15 |= sizes(encoder_hidden_size=64, encoder_intermediate_size=96, encoder_num_heads=2)
ACE_15_MARKS = {"encoder.lyric_encoder.layers.0.input_layernorm.weight": (64,)}
LYRICS: dict[str, Any] = {"conditioning_lyrics": (1, 5, 32)}
COSMOS_1 = sizes(max_img_h=16, max_img_w=16, max_frames=8, model_channels=96, num_blocks=2, num_heads=2)
COSMOS_1 |= sizes(crossattn_emb_channels=32, adaln_lora_dim=16)
MOCHI = sizes(depth=3, num_heads=2, hidden_size_x=64, mlp_ratio_x=192, hidden_size_y=48, t5_feat_dim=32)


def wan(config: str, marks: dict[str, Shape], given: dict[str, Any], *, once: str = "", **network: Any) -> Layout:
    return Layout(config, WAN | network, FRAMES, "blocks.0.ffn.0", marks=WAN_MARKS | marks, extra=given, once=once)


def cosmos_1(config: str, values: int, given: dict[str, Any]) -> Layout:
    """values: of a patch."""
    marks = {"blocks.block0.blocks.0.block.attn.to_q.0.weight": (96, 96), "x_embedder.proj.1.weight": (96, values)}
    hot = "blocks.block0.blocks.2.block.layer1"
    return Layout(config, COSMOS_1, FRAMES, hot, marks=marks, scheduler="karras", extra=given | {"frame_rate": 24.0})


def ace_15(given: dict[str, Any]) -> Layout:
    hot = "decoder.layers.0.mlp.up_proj"  # rounds: its rotations are kept in half precision
    return Layout("ACEStep15", ACE_15, (1, 64, 20), hot, marks=ACE_15_MARKS, extra=LYRICS | given, rounds=1e-4)


def varied(
    layout: Layout,
    given: dict[str, Any],
    config: str = "",
    marks: Mapping[str, Shape] = MappingProxyType({}),
    **network: Any,
) -> Layout:
    """Return a layout with further conditions, sizes and marks."""
    given, marks = {**layout.extra, **given}, {**layout.marks, **marks}
    network = {**layout.sizes, **network}
    return replace(layout, config=config or layout.config, sizes=network, marks=marks, extra=given)


IMAGE_MARKS: dict[str, Shape] = {"img_emb.proj.0.bias": (1280,)}
CAMERA_MARKS: dict[str, Shape] = {"control_adapter.conv.weight": (96, 1536, 2, 2)}
SCAIL_MARKS = IMAGE_MARKS | {"patch_embedding_pose.weight": (96, 20, 1, 2, 2)}
FURTHER_VIDEO_LAYOUTS = {
    "wan_i2v": wan("WAN21_I2V", IMAGE_MARKS, FIRST | VISION, in_dim=36),
    "wan_first_last": wan("WAN21_I2V", IMAGE_MARKS | {"img_emb.emb_pos": (1, 10, 1280)}, FIRST | VISION, in_dim=36),
    "wan_references": wan("WAN21_T2V", {}, {"time_dim_concat": PICTURE, "context_latents": [PICTURE]}),
    "wan_control": wan(
        "WAN21_FunControl2V",
        IMAGE_MARKS | {"ref_conv.weight": (96, 16, 2, 2)},
        VISION | REFERENCE | {"concat_latent_image": (1, 32, 2, 8, 8)},
        in_dim=48,
    ),
    "wan_camera": wan(
        "WAN21_Camera", IMAGE_MARKS | CAMERA_MARKS, VISION | CAMERA | {"concat_latent_image": FRAMES}, in_dim=32
    ),
    "wan22_camera": wan("WAN22_Camera", CAMERA_MARKS, FIRST | CAMERA, in_dim=36),
    "wan_vace": wan(
        "WAN21_Vace",
        {"vace_patch_embedding.weight": (96, 96, 1, 2, 2)},
        {"vace_frames": [(1, 32, 2, 8, 8)] * 2, "vace_mask": [(1, 64, 2, 8, 8)] * 2, "vace_strength": [1.0, 0.5]},
        vace_layers=2,
        vace_in_dim=96,
    ),
    "wan_animate": wan(  # its adapter follows every fifth block
        "WAN22_Animate",
        {"face_adapter.fuser_blocks.0.k_norm.weight": (48,)},
        FIRST | VISION | {"face_video_pixels": (1, 3, 4, 8, 8), "pose_video_latent": PICTURE},
        in_dim=36,
        num_layers=5,
    ),
    "wan_animate2": wan(
        "WAN_Animate2",
        IMAGE_MARKS,
        FIRST
        | VISION
        | {"clip_vision_output_pose": SEEN, "pose_video_latent": PICTURE, "cross_attn_pose": (1, 7, 32)}
        | {"pose_strength": 0.8, "reference_strength": 0.9},
        in_dim=36,
        model_type="animate2",
        once="head",  # blocks have two methods instead of `forward`
    ),
    "wan_s2v": wan(
        "WAN22_S2V",
        {"casual_audio_encoder.encoder.final_linear.weight": (96, 96)},
        REFERENCE | {"audio_embed": (1, 25, 32, 8), "reference_motion": (1, 16, 19, 8, 8), "control_video": FRAMES},
        audio_dim=32,
        audio_inject_layers=[0, 1],
    ),
    "wan_humo": wan(
        "WAN21_HuMo",
        {"audio_proj.audio_proj_glob_1.layer.bias": (16,)},
        REFERENCE | {"audio_embed": (1, 2, 8, 5, AUDIO_PROJECTION["channels"])},
    ),
    "wan_scail": wan(
        "WAN21_SCAIL", SCAIL_MARKS, VISION | REFERENCE | {"pose_video_latent": (1, 16, 2, 4, 4)}, in_dim=20
    ),
    "wan_scail2": wan(
        "WAN21_SCAIL2",
        SCAIL_MARKS | {"patch_embedding_mask.weight": (96, 28, 1, 2, 2)},
        VISION
        | {"reference_latents": [PICTURE] * 2, "pose_video_latent": (1, 16, 2, 4, 4), "ref_mask_flag": False}
        | {"driving_mask_28ch": (1, 2, 28, 4, 4), "ref_mask_28ch": (1, 4, 28, 8, 8)},
        in_dim=20,
    ),
    "wan_dancer": wan(
        "WAN22_WanDancer",
        IMAGE_MARKS | {"patch_embedding_global.weight": (96, 36, 1, 2, 2)},
        FIRST
        | VISION
        | {"clip_vision_output_ref": SEEN, "audio_embed": (1, 9, 35), "fps": 24.0, "audio_inject_scale": 0.9},
        in_dim=36,
        audio_inject_layers=[0, 1],
        music_dim=32,
        music_heads=2,
        music_latent_dim=32,
    ),
    "mochi": Layout(
        "GenmoMochi", MOCHI, (1, 12, 2, 8, 8), "blocks.0.mlp_x.w1", marks={"t5_yproj.weight": (48, 32)}, ones=MASK
    ),
    "stable_audio": Layout(
        "StableAudio",
        sizes(embed_dim=128, num_heads=2, depth=2, project_cond_tokens=True),
        (1, 64, 16),
        "transformer.layers.0.ff.ff.0.proj",
        context=(1, 7, 768),
        scheduler="exponential",
        marks=STABLE_AUDIO_MARKS,
        extra={"seconds_start": 1.0, "seconds_total": 40.0},
    ),
    "stable_audio_3": Layout(
        "StableAudio3",
        sizes(embed_dim=128, depth=2),
        (1, 256, 16),
        "transformer.layers.0.ff.ff.0.proj",
        context=(1, 7, 768),
        marks=STABLE_AUDIO_3_MARKS,
        extra={"seconds_total": 40.0, "concat_latent_image": (1, 256, 16), "concat_mask": (1, 1, 16)},
    ),
    "ace_15": ace_15({"audio_codes": [[3, 40000, 7, 9]]}),
    "ace_15_cover": ace_15({"reference_audio_timbre_latents": [(1, 64, 20)]}),
    "cosmos_1": cosmos_1("CosmosT2V", 68, {}),
    "cosmos_1_i2v": cosmos_1("CosmosI2V", 72, FIRST),
    "cosmos_predict2_i2v": Layout(
        "CosmosI2VPredict2",
        COSMOS | sizes(in_channels=17),
        FRAMES,
        "blocks.0.mlp.layer1",
        marks=COSMOS_MARKS,
        extra={"concat_mask": (1, 1, 2, 8, 8), "frame_rate": 16.0},
    ),
    "hunyuan_video_i2v": varied(HUNYUAN_VIDEO, FIRST, "HunyuanVideoI2V", in_channels=33),
    "hunyuan_video_references": varied(HUNYUAN_VIDEO, {"guiding_frame_index": 0, "ref_latent": PICTURE}),
    "skyreels_i2v": varied(HUNYUAN_VIDEO, FIRST, "HunyuanVideoSkyreelsI2V", in_channels=32),
    "hunyuan_video_15_i2v": varied(
        HUNYUAN_VIDEO_15,
        SEEN_15
        | {"concat_latent_image": (1, 32, 2, 4, 4), "concat_mask": (1, 1, 2, 4, 4)}
        | {"conditioning_byt5small": (1, 4, 1472)},
        byt5=True,
    ),
    "hunyuan_video_15_sr": varied(
        HUNYUAN_VIDEO_15,
        SEEN_15 | {"concat_latent_image": (1, 66, 2, 4, 4), "noise_augmentation": 0.7},
        "HunyuanVideo15_SR_Distilled",
        {"img_in.proj.weight": (48, 98, 1, 1, 1), "time_r_in.in_layer.weight": (48, 256)},
        in_channels=98,
    ),
    "cogvideox_i2v": varied(COGVIDEOX, {"concat_latent_image": PICTURE}, "CogVideoX_I2V", in_channels=32),
    "cogvideox_15_i2v": varied(
        COGVIDEOX,
        {"concat_latent_image": PICTURE},
        "CogVideoX_I2V",
        {"ofs_embedding_linear_1.weight": (32, 32)},
        in_channels=32,
        patch_size_t=2,
    ),
    "cogvideox_inpaint": varied(
        COGVIDEOX, {"concat_latent_image": (1, 32, 2, 8, 8)}, "CogVideoX_Inpaint", in_channels=48
    ),
    "kandinsky5_i2v": varied(KANDINSKY5, {"concat_mask": (1, 1, 1, 8, 8), "time_dim_replace": PICTURE}),
    "kandinsky5_image": replace(varied(KANDINSKY5, {}, "Kandinsky5Image", visual_embed_dim=64), latents=(1, 16, 8, 8)),
}
FURTHER_VIDEO_LAYOUTS = {
    name: layout for name, layout in FURTHER_VIDEO_LAYOUTS.items() if hasattr(SUPPORTED, layout.config)
}

if "wan_animate" in FURTHER_VIDEO_LAYOUTS:
    animate: Any = import_module("comfy.ldm.wan.model_animate")

    class EncoderApp(animate.EncoderApp):
        """With one block of seven, for faces of 8 × 8 pixels."""

        def __init__(self, w_dim: int, **how: Any):
            super().__init__(w_dim, **how)
            self.convs = torch.nn.ModuleList([*self.convs[:2], animate.EqualConv2d(64, w_dim, 4, bias=False, **how)])

    animate.EncoderApp = EncoderApp
if "wan_humo" in FURTHER_VIDEO_LAYOUTS:
    wan_models: Any = import_module("comfy.ldm.wan.model")
    projection = wan_models.AudioProjModel
    wan_models.AudioProjModel = lambda **given: projection(**(given | AUDIO_PROJECTION))
