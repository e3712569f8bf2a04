"""Builders of small model folders: CogView3-Plus, CogView4 and Stable Video Diffusion.

As in demo/small_model.py: real classes, published file layout and settings, random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from comfyui_onediff_guard.demo.small_model import (
    VARIANTS,
    Overflow,
    build_cogvideox,
    draw_weights,
    make_stream_overflow,
    new_folder,
    save,
    small_text_encoder,
)
from comfyui_onediff_guard.demo.small_tokenizer import SENTENCES, train_tokenizer, write_json
from diffusers import (
    AutoencoderKL,
    AutoencoderKLTemporalDecoder,
    CogVideoXDDIMScheduler,
    CogView3PlusPipeline,
    CogView3PlusTransformer2DModel,
    CogView4Pipeline,
    CogView4Transformer2DModel,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    StableVideoDiffusionPipeline,
    UNetSpatioTemporalConditionModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    GlmConfig,
    GlmModel,
    PreTrainedTokenizerFast,
)

TEXT_WIDTH = 32
GLM_VOCABULARY = 384  # bytes, byte pairs and special tokens
GLM_SPECIAL = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)


def build_cogview3(folder: Path, *, overflow: Overflow = "none", layers: int = 2) -> Path:
    """Write a small CogView3-Plus pipeline to `folder`, which must not exist yet, and return `folder`.

    overflow: "stream" makes the feed-forward of one block write |x| of about 5e5 into the residual stream. In plain
    fp16 the block clips that to 65504: each step is finite and wrong.
    """
    scheduler = CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.0120,
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        set_alpha_to_one=True,
        snr_shift_scale=4.0,
        timestep_spacing="trailing",
    )
    kinds, gates = (CogView3PlusPipeline, CogView3PlusTransformer2DModel), (5, 11) if overflow == "stream" else ()
    return _build_cogview(folder, kinds, train_tokenizer, lambda _: small_text_encoder(), gates, scheduler, layers)


def build_cogview4(folder: Path, *, overflow: Overflow = "none") -> Path:
    """Like build_cogview3, but CogView4 does not clip: "stream" is NaN in plain fp16."""
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        base_shift=0.25,
        max_image_seq_len=4096,
        max_shift=0.75,
        shift=1.0,
        time_shift_type="linear",
        use_dynamic_shifting=True,
    )
    kinds, gates = (CogView4Pipeline, CogView4Transformer2DModel), (10, 11) if overflow == "stream" else ()
    named = {"tokenizer": "PreTrainedTokenizerFast"}  # diffusers annotates it as AutoTokenizer
    return _build_cogview(folder, kinds, train_glm_tokenizer, small_glm, gates, scheduler, shift=0.0, named=named)


def _build_cogview(
    folder: Path,
    kinds: tuple[Any, Any],
    train: Callable[[Path], Any],
    encoder_of: Callable[[Any], Any],
    gates: tuple[int, ...],
    scheduler: Any,
    layers: int = 2,
    shift: float | None = None,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """kinds: classes of pipeline and transformer. gates: of `_overflow_stream`. shift: of the VAE."""
    with new_folder(folder) as temporary, torch.random.fork_rng(devices=[]):
        tokenizer = train(temporary / "tokenizer")
        torch.manual_seed(0)
        text_encoder = encoder_of(tokenizer)
        torch.manual_seed(1)
        transformer = kinds[1](
            num_layers=layers,
            num_attention_heads=4,
            attention_head_dim=16,
            text_embed_dim=TEXT_WIDTH,
            time_embed_dim=32,
            condition_dim=8,
            sample_size=16,
        )
        if gates:
            _overflow_stream(transformer, gates)
        torch.manual_seed(2)
        vae = small_image_vae(shift_factor=shift)
        parts = {"tokenizer": tokenizer, "text_encoder": text_encoder, "transformer": transformer, "vae": vae}
        save(kinds[0](**parts, scheduler=scheduler), temporary, torch.float32, named=named)
    return folder


def build_svd(folder: Path, *, frames: int = 14) -> Path:
    """Write a small Stable Video Diffusion pipeline. frames: 14 is SVD, 25 is SVD-XT; the pipeline's default."""
    with new_folder(folder) as temporary, torch.random.fork_rng(devices=[]):
        (temporary / "feature_extractor").mkdir()
        write_json(temporary / "feature_extractor" / "preprocessor_config.json", CLIP_IMAGES)
        torch.manual_seed(0)
        image_encoder = CLIPVisionModelWithProjection(
            CLIPVisionConfig(
                hidden_size=32,
                intermediate_size=64,
                projection_dim=TEXT_WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=224,
                patch_size=14,
                hidden_act="gelu",
            )
        )
        draw_weights(image_encoder)
        torch.manual_seed(1)
        # the class uses norms of 32 groups, so no level can be narrower
        unet = UNetSpatioTemporalConditionModel(
            sample_size=8,
            block_out_channels=(32, 32, 32, 64),
            addition_time_embed_dim=16,
            projection_class_embeddings_input_dim=48,
            layers_per_block=1,
            cross_attention_dim=TEXT_WIDTH,
            num_attention_heads=(2, 2, 2, 4),
            num_frames=frames,
        )
        torch.manual_seed(2)
        levels: dict[str, Any] = {  # diffusers annotates them as tuples of one
            "block_out_channels": (32, 32, 32, 32),
            "down_block_types": ("DownEncoderBlock2D",) * 4,
        }
        vae = AutoencoderKLTemporalDecoder(
            **levels, latent_channels=4, sample_size=64, scaling_factor=0.18215, force_upcast=True
        )
        pipeline = StableVideoDiffusionPipeline(
            vae=vae.eval(),
            image_encoder=image_encoder,
            unet=unet,
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                prediction_type="v_prediction",
                interpolation_type="linear",
                use_karras_sigmas=True,
                sigma_min=0.002,
                sigma_max=700.0,
                timestep_spacing="leading",
                timestep_type="continuous",
                steps_offset=1,
            ),
            feature_extractor=CLIPImageProcessor.from_pretrained(temporary / "feature_extractor"),
        )
        save(pipeline, temporary, torch.float32, named={"feature_extractor": "CLIPImageProcessor"})
    return folder


BUILDERS: Mapping[str, Callable[..., Path]] = {
    **{variant: partial(build_cogvideox, variant=variant) for variant in VARIANTS},
    "cogview3": build_cogview3,
    "cogview4": build_cogview4,
    "svd": build_svd,
    "svd-xt": partial(build_svd, frames=25),
}


def small_image_vae(*, shift_factor: float | None) -> AutoencoderKL:
    """CogView's VAE: scale 8, 16 latent channels, no attention and no convolutions around the latents."""
    levels: dict[str, Any] = {
        "block_out_channels": (8, 16, 16, 16),
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
    }
    return AutoencoderKL(
        **levels,
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=1.0,
        shift_factor=shift_factor,
        force_upcast=True,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    ).eval()


def train_glm_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, write it to `folder` in GLM-4's published form, and load it.

    Each text starts with [gMASK]<sop>, so an empty text has tokens; shorter ones are padded on the left.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=GLM_VOCABULARY - len(GLM_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    bpe.add_special_tokens(list(GLM_SPECIAL))
    start = [(token, bpe.token_to_id(token)) for token in ("[gMASK]", "<sop>")]
    template = processors.TemplateProcessing(
        single="[gMASK]:0 <sop>:0 $A:0", pair="[gMASK]:0 <sop>:0 $A:0 $B:1", special_tokens=start
    )
    bpe.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    named = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    folder.mkdir()
    bpe.save(str(folder / "tokenizer.json"))
    write_json(folder / "special_tokens_map.json", {**named, "additional_special_tokens": GLM_SPECIAL})
    write_json(
        folder / "tokenizer_config.json",
        {
            **named,
            "additional_special_tokens": GLM_SPECIAL,
            "clean_up_tokenization_spaces": False,
            "do_lower_case": False,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 128000,
            "padding_side": "left",
            "remove_space": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    return PreTrainedTokenizerFast.from_pretrained(folder)


def small_glm(tokenizer: PreTrainedTokenizerFast) -> GlmModel:
    """A GLM-4 of three layers; CogView4 uses the output of the last but one."""
    config: dict[str, Any] = {
        "vocab_size": GLM_VOCABULARY,
        "hidden_size": TEXT_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 8192,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return draw_weights(GlmModel(GlmConfig(**config)))


def _overflow_stream(transformer: Any, gates: tuple[int, int]) -> None:
    make_stream_overflow(transformer, ("norm1.linear", gates), lambda: transformer(**cogview_call(transformer)))


def cogview_call(transformer: Any, batch: int = 1) -> dict[str, Any]:
    """Arguments of one step, from random latents of 16 × 16."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[128.0, 128.0]] * batch)
    return {
        "hidden_states": torch.randn(batch, 16, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 32, transformer.config.text_embed_dim, generator=generator),
        "timestep": torch.tensor([500] * batch),
        "original_size": sizes,
        "target_size": sizes,
        "crop_coords": torch.zeros(batch, 2),
        "return_dict": False,
    }


CLIP_IMAGES: dict[str, Any] = {  # the published preprocessor_config.json
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 224},
}
