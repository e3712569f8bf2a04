"""What a component's config.json may say: the fields that its class takes, each of a kind and within bounds.

Bounds are far beyond every published model, and keep a file from asking for a billion layers. What a config could ask
of a library beyond numbers (a kernel from the hub, a quantiser, other files) is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from ...trust.foreign import Foreign, Unreadable, fitting
from ...trust.text import shown

Config = Mapping[str, Any]

_Width = Annotated[int, Field(ge=1, le=2**20)]  # channels, vocabularies
_Extent = Annotated[int, Field(ge=1, le=4096)]  # frames, tokens, pixels along a side
_Layers = Annotated[int, Field(ge=1, le=256)]  # published: 42
_Few = Annotated[int, Field(ge=1, le=16)]
_Levels = Annotated[list[_Width], Field(min_length=1, max_length=8)]
_Word = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
_Words = Annotated[list[_Word], Field(min_length=1, max_length=8)]
_Number = Annotated[float, Field(ge=-1e6, le=1e6)]
_Positive = Annotated[float, Field(gt=0, le=1e9)]
_Numbers = Annotated[list[_Number], Field(max_length=4096)]
_Token = Annotated[int, Field(ge=-1, lt=2**20)]
_Tokens = _Token | Annotated[list[_Token], Field(max_length=64)] | None
_Sides = _Width | Annotated[list[_Width], Field(min_length=2, max_length=2)]


class _Fields(Foreign):
    """Every field has a default of no meaning: one that is missing is left to the class."""

    def given(self) -> dict[str, Any]:
        """The fields that the config holds."""
        return self.model_dump(exclude_unset=True)


class _T5(_Fields):
    vocab_size: _Width = 1
    d_model: _Width = 1
    d_kv: _Width = 1
    d_ff: _Width = 1
    num_layers: _Layers = 1
    num_decoder_layers: _Layers | None = None
    num_heads: _Width = 1
    relative_attention_num_buckets: _Width = 1
    relative_attention_max_distance: _Width = 1
    dropout_rate: _Number = 0
    layer_norm_epsilon: _Positive = 1
    initializer_factor: _Number = 0
    feed_forward_proj: _Word = ""
    dense_act_fn: _Word = ""
    is_gated_act: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: _Token | None = None
    eos_token_id: _Tokens = None


class _Glm(_Fields):
    vocab_size: _Width = 1
    hidden_size: _Width = 1
    intermediate_size: _Width = 1
    num_hidden_layers: _Layers = 1
    num_attention_heads: _Width = 1
    num_key_value_heads: _Width | None = None
    head_dim: _Width = 1
    hidden_act: _Word = ""
    attention_dropout: _Number = 0
    attention_bias: bool = False
    max_position_embeddings: Annotated[int, Field(ge=1, le=2**24)] = 1
    initializer_range: _Number = 0
    rms_norm_eps: _Positive = 1
    rope_theta: _Positive = 1
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1
    rope_scaling: dict[_Word, _Positive | _Word] | None = None
    rope_parameters: dict[_Word, _Positive | _Word] | None = None
    tie_word_embeddings: bool = False
    pad_token_id: _Token | None = None
    bos_token_id: _Tokens = None
    eos_token_id: _Tokens = None


class _ClipVision(_Fields):
    hidden_size: _Width = 1
    intermediate_size: _Width = 1
    projection_dim: _Width = 1
    num_hidden_layers: _Layers = 1
    num_attention_heads: _Width = 1
    num_channels: _Width = 1
    image_size: _Extent = 1
    patch_size: _Width = 1
    hidden_act: _Word = ""
    layer_norm_eps: _Positive = 1
    attention_dropout: _Number = 0
    initializer_range: _Number = 0
    initializer_factor: _Number = 0


class _Transformer(_Fields):
    """What the Cog denoisers share."""

    num_attention_heads: _Width = 1
    attention_head_dim: _Width = 1
    in_channels: _Width = 1
    out_channels: _Width | None = None
    num_layers: _Layers = 1
    patch_size: _Width = 1
    text_embed_dim: _Width = 1
    time_embed_dim: _Width = 1


class _CogVideoX(_Transformer):
    activation_fn: _Word = ""
    timestep_activation_fn: _Word = ""
    attention_bias: bool = False
    dropout: _Number = 0
    flip_sin_to_cos: bool = False
    freq_shift: _Number = 0
    max_text_seq_length: _Extent = 1
    norm_elementwise_affine: bool = False
    norm_eps: _Positive = 1
    ofs_embed_dim: _Width | None = None
    patch_bias: bool = False
    patch_size_t: _Width | None = None
    sample_frames: _Extent = 1
    sample_height: _Extent = 1
    sample_width: _Extent = 1
    spatial_interpolation_scale: _Positive = 1
    temporal_interpolation_scale: _Positive = 1
    temporal_compression_ratio: _Width = 1
    use_learned_positional_embeddings: bool = False
    use_rotary_positional_embeddings: bool = False


class _CogView(_Transformer):
    condition_dim: _Width = 1
    pos_embed_max_size: _Extent = 1
    rope_axes_dim: Annotated[list[_Width], Field(min_length=2, max_length=2)] = []
    sample_size: _Width = 1


class _SvdUNet(_Fields):
    sample_size: _Sides | None = None
    in_channels: _Width = 1
    out_channels: _Width = 1
    down_block_types: _Words = []
    up_block_types: _Words = []
    block_out_channels: _Levels = []
    addition_time_embed_dim: _Width = 1
    projection_class_embeddings_input_dim: _Width = 1
    layers_per_block: _Few | Annotated[list[_Few], Field(max_length=8)] = 1
    cross_attention_dim: _Width | _Levels = 1
    transformer_layers_per_block: _Few | Annotated[list[_Few], Field(max_length=8)] = 1
    num_attention_heads: _Width | _Levels = 1
    num_frames: _Extent = 1


class _Vae(_Fields):
    """What the VAEs share."""

    in_channels: _Width = 1
    out_channels: _Width = 1
    down_block_types: _Words = []
    up_block_types: _Words = []
    block_out_channels: _Levels = []
    layers_per_block: _Few = 1
    latent_channels: _Width = 1
    act_fn: _Word = ""
    norm_num_groups: _Width = 1
    scaling_factor: _Positive = 1
    shift_factor: _Number | None = None
    latents_mean: _Numbers | None = None
    latents_std: _Numbers | None = None
    force_upcast: bool = False
    sample_size: _Sides = 1
    use_quant_conv: bool = False
    use_post_quant_conv: bool = False
    mid_block_add_attention: bool = False
    # of CogVideoX's
    norm_eps: _Positive = 1
    sample_height: _Width = 1
    sample_width: _Width = 1
    temporal_compression_ratio: Annotated[float, Field(ge=1, le=2**20)] = 1
    invert_scale_latents: bool = False


class _Scheduler(_Fields):
    """What any of the schedulers takes."""

    num_train_timesteps: Annotated[int, Field(ge=1, le=100_000)] = 1
    beta_start: _Positive = 1
    beta_end: _Positive = 1
    beta_schedule: _Word = ""
    trained_betas: Annotated[list[_Positive], Field(max_length=100_000)] | None = None
    clip_sample: bool = False
    clip_sample_range: _Positive = 1
    set_alpha_to_one: bool = False
    steps_offset: Annotated[int, Field(ge=0, le=1000)] = 0
    prediction_type: _Word = ""
    sample_max_value: _Positive = 1
    timestep_spacing: _Word = ""
    timestep_type: _Word = ""
    rescale_betas_zero_snr: bool = False
    snr_shift_scale: _Positive = 1
    interpolation_type: _Word = ""
    final_sigmas_type: _Word = ""
    use_karras_sigmas: bool | None = None
    use_exponential_sigmas: bool | None = None
    use_beta_sigmas: bool | None = None
    sigma_min: _Positive | None = None
    sigma_max: _Positive | None = None
    shift: _Positive = 1
    shift_terminal: _Positive | None = None
    use_dynamic_shifting: bool = False
    base_shift: _Number | None = None
    max_shift: _Number | None = None
    base_image_seq_len: _Width | None = None
    max_image_seq_len: _Width | None = None
    invert_sigmas: bool = False
    stochastic_sampling: bool = False
    time_shift_type: _Word = ""


class _Pixels(_Fields):
    shortest_edge: _Extent | None = None
    longest_edge: _Extent | None = None
    height: _Extent | None = None
    width: _Extent | None = None


class _ClipImages(_Fields):
    crop_size: _Pixels | _Extent | None = None
    size: _Pixels | _Extent | None = None
    do_center_crop: bool | None = None
    do_convert_rgb: bool | None = None
    do_normalize: bool | None = None
    do_rescale: bool | None = None
    do_resize: bool | None = None
    image_mean: _Numbers | _Number | None = None
    image_std: _Numbers | _Number | None = None
    resample: Annotated[int, Field(ge=0, le=5)] | None = None
    rescale_factor: _Positive | None = None


class _Tokenizer(_Fields):
    extra_ids: Annotated[int, Field(ge=0, le=1000)] = 0  # T5's, each of which becomes a token
    legacy: bool | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None


_FIELDS: dict[str, type[_Fields]] = {  # class in model_index.json → what its config holds
    "T5EncoderModel": _T5,
    "GlmModel": _Glm,
    "CLIPVisionModelWithProjection": _ClipVision,
    "CogVideoXTransformer3DModel": _CogVideoX,
    "CogView3PlusTransformer2DModel": _CogView,
    "CogView4Transformer2DModel": _CogView,
    "UNetSpatioTemporalConditionModel": _SvdUNet,
    "AutoencoderKLCogVideoX": _Vae,
    "AutoencoderKL": _Vae,
    "AutoencoderKLTemporalDecoder": _Vae,
    "CogVideoXDDIMScheduler": _Scheduler,
    "CogVideoXDPMScheduler": _Scheduler,
    "FlowMatchEulerDiscreteScheduler": _Scheduler,
    "EulerDiscreteScheduler": _Scheduler,
    "CLIPImageProcessor": _ClipImages,
    "CLIPImageProcessorPil": _ClipImages,
    "CLIPImageProcessorFast": _ClipImages,
    "T5Tokenizer": _Tokenizer,
    "T5TokenizerFast": _Tokenizer,
    "PreTrainedTokenizer": _Tokenizer,
    "PreTrainedTokenizerFast": _Tokenizer,
    "TokenizersBackend": _Tokenizer,
}
_ATTENTION = ("eager", "sdpa")  # built in; every other name may be a kernel of somebody's on the hub
_REFUSED: dict[str, tuple[str, ...]] = {  # field → words that do no harm there; nothing at all (null, {}) never does
    **{
        f"{a}{b}_implementation{c}": _ATTENTION
        for a in ("", "_")
        for b in ("attn", "experts")
        for c in ("", "_internal")
    },
    **dict.fromkeys(("quantization_config", "compression_config"), ()),  # other weights than the files hold
    **dict.fromkeys(("kernel_config", "use_kernels", "fusion_config", "distributed_config", "per_layer_config"), ()),
    **dict.fromkeys(("transformers_weights", "gguf_file", "base_model_name_or_path", "init_inputs"), ()),  # other files
    **dict.fromkeys(("_use_default_values", "sp_model_kwargs"), ()),  # hides fields; settings of a sampling tokenizer
}
_INERT_FILES = ("special_tokens_map_file",)  # a path of its author's, which nothing opens


def fields_of(name: str, config: Config) -> dict[str, Any]:
    """The fields of a config that its class takes, checked. name: of the class. Raises Unreadable."""
    refuse_hooks(config)
    named = config.get("_class_name", name)
    if named != name and _FIELDS[name] is not _Scheduler:  # of which one reads another's config
        raise Unreadable(f"its '_class_name' is {shown(named)}, and model_index.json names {name}")
    return fitting(_FIELDS[name], config).given()


def refuse_hooks(config: Config) -> None:
    """Raise Unreadable for a field, at any depth, that would have a library take more than numbers from the config."""
    for place, name, value in _walk(config, ""):
        is_file = name.endswith("_file") and name not in _INERT_FILES
        if not (is_file or name in _REFUSED) or value in (None, False, "", [], {}):
            continue
        if isinstance(value, str) and value in _REFUSED.get(name, ()):
            continue
        raise Unreadable(f"its '{shown(place)}' is {shown(value)}, which is refused in a model that others made")


def _walk(value: Any, place: str) -> Iterator[tuple[str, str, Any]]:
    """(place, name, value) of every field."""
    if isinstance(value, dict):
        for name, inner in value.items():
            here = f"{place}.{name}" if place else name
            yield here, name, inner
            yield from _walk(inner, here)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, place)
