"""Components of diffusers pipelines: what their config.json may hold, each field of a kind and within bounds, and the
components that several families share.

Bounds are far beyond every published model, and keep a file from asking for a billion layers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ...trust.foreign import Foreign
from ...trust.text import shown
from ..errors import LibraryFailed

if TYPE_CHECKING:
    import torch

Width = Annotated[int, Field(ge=1, le=2**20)]  # channels, vocabularies
Extent = Annotated[int, Field(ge=1, le=4096)]  # frames, tokens, pixels along a side
Layers = Annotated[int, Field(ge=1, le=256)]  # published: 42
Few = Annotated[int, Field(ge=1, le=16)]
Levels = Annotated[list[Width], Field(min_length=1, max_length=8)]
Word = Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
Words = Annotated[list[Word], Field(min_length=1, max_length=8)]
Number = Annotated[float, Field(ge=-1e6, le=1e6)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Numbers = Annotated[list[Number], Field(max_length=4096)]
Token = Annotated[int, Field(ge=-1, lt=2**20)]
Tokens = Token | Annotated[list[Token], Field(max_length=64)] | None
Sides = Width | Annotated[list[Width], Field(min_length=2, max_length=2)]


class Fields(Foreign):
    """The fields of a config. Each may be missing, and is left to the class then."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in inspect.get_annotations(cls):
            if name not in cls.__dict__:
                setattr(cls, name, None)

    def given(self) -> dict[str, Any]:
        """Return the fields that the config holds."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class ComponentSpec:
    """One folder of a diffusers pipeline."""

    library: str  # "diffusers" or "transformers"
    classes: tuple[str, ...]  # accepted in model_index.json; the first is the usual one
    fields: type[Fields]  # what its config holds
    needs: tuple[tuple[str, ...], ...] = ()  # where it has no weights: of each group of files, one or more
    reads: tuple[str, ...] = ()  # files that may be beside them. No others are read

    @property
    def weights(self) -> bool:
        return not self.needs

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are read of a component without weights."""
        return (*(name for group in self.needs for name in group), *self.reads)

    def class_named(self, name: str = "") -> Any:
        """Return a class of its library: the usual one where none is named, or where the installed version has none of
        this name.

        Raises LibraryFailed where the library cannot be imported.
        """
        try:
            import diffusers
            import transformers

            library = {"diffusers": diffusers, "transformers": transformers}[self.library]
            return getattr(library, name, None) or getattr(library, self.classes[0])
        except Exception as error:
            optimised = "Unset PYTHONOPTIMIZE: 2, like `python -OO`, takes away docstrings that it reads."
            raise LibraryFailed(
                "{} cannot be imported ({}: {}). {}",
                self.library,
                type(error).__name__,
                shown(str(error), 300),
                optimised if sys.flags.optimize > 1 else "Install requirements.txt of this pack again.",
            ) from error

    def on_meta(
        self, config: Mapping[str, Any], dtype: torch.dtype | None = None, *, name: str = ""
    ) -> torch.nn.Module:
        """Build what a config describes on the meta device, where it takes no memory.

        dtype: what its weights are in, as if they had been loaded in that; None leaves them as the class makes them.
        name: the class, where it is not the usual one.
        """
        import torch

        from ...precision.loaded_weights import as_loaded

        cls = self.class_named(name)
        with torch.device("meta"):
            if self.library == "transformers":
                module = cls(cls.config_class.from_dict(dict(config)))
            else:
                module = cls.from_config(dict(config))
        torch.nn.Module.to(module, "meta")  # what asked for another device
        return as_loaded(module, dtype) if dtype else module


class T5(Fields):
    vocab_size: Width
    d_model: Width
    d_kv: Width
    d_ff: Width
    num_layers: Layers
    num_decoder_layers: Layers | None
    num_heads: Width
    relative_attention_num_buckets: Width
    relative_attention_max_distance: Width
    dropout_rate: Number
    layer_norm_epsilon: Positive
    initializer_factor: Number
    feed_forward_proj: Word
    dense_act_fn: Word
    is_gated_act: bool
    tie_word_embeddings: bool
    pad_token_id: Token | None
    eos_token_id: Tokens


class Transformer(Fields):
    """What the denoisers of CogVideoX and CogView share."""

    num_attention_heads: Width
    attention_head_dim: Width
    in_channels: Width
    out_channels: Width | None
    num_layers: Layers
    patch_size: Width
    text_embed_dim: Width
    time_embed_dim: Width


class Vae(Fields):
    """What the VAEs of images, of Stable Video Diffusion and of CogVideoX share."""

    in_channels: Width
    out_channels: Width
    down_block_types: Words
    up_block_types: Words
    block_out_channels: Levels
    layers_per_block: Few
    latent_channels: Width
    act_fn: Word
    norm_num_groups: Width
    scaling_factor: Positive
    shift_factor: Number | None
    latents_mean: Numbers | None
    latents_std: Numbers | None
    force_upcast: bool
    sample_size: Sides
    use_quant_conv: bool
    use_post_quant_conv: bool
    mid_block_add_attention: bool
    # of CogVideoX's
    norm_eps: Positive
    sample_height: Width
    sample_width: Width
    temporal_compression_ratio: Annotated[float, Field(ge=1, le=2**20)]
    invert_scale_latents: bool


class Scheduler(Fields):
    """What any of the schedulers takes, since one may read another's config."""

    num_train_timesteps: Annotated[int, Field(ge=1, le=100_000)]
    beta_start: Positive
    beta_end: Positive
    beta_schedule: Word
    trained_betas: Annotated[list[Positive], Field(max_length=100_000)] | None
    clip_sample: bool
    clip_sample_range: Positive
    set_alpha_to_one: bool
    steps_offset: Annotated[int, Field(ge=0, le=1000)]
    prediction_type: Word
    sample_max_value: Positive
    timestep_spacing: Word
    timestep_type: Word
    rescale_betas_zero_snr: bool
    snr_shift_scale: Positive
    interpolation_type: Word
    final_sigmas_type: Word
    use_karras_sigmas: bool | None
    use_exponential_sigmas: bool | None
    use_beta_sigmas: bool | None
    sigma_min: Positive | None
    sigma_max: Positive | None
    shift: Positive
    shift_terminal: Positive | None
    use_dynamic_shifting: bool
    base_shift: Number | None
    max_shift: Number | None
    base_image_seq_len: Width | None
    max_image_seq_len: Width | None
    invert_sigmas: bool
    stochastic_sampling: bool
    time_shift_type: Word


class Tokenizer(Fields):
    extra_ids: Annotated[int, Field(ge=0, le=1000)]  # T5's, each of which becomes a token
    legacy: bool | None
    add_bos_token: bool | None
    add_eos_token: bool | None


TOKENIZER_ALSO = ("special_tokens_map.json", "added_tokens.json")
T5_TOKENIZER = ComponentSpec(
    "transformers",
    ("T5Tokenizer", "T5TokenizerFast"),
    Tokenizer,
    needs=(("tokenizer_config.json",), ("spiece.model", "tokenizer.json")),
    reads=TOKENIZER_ALSO,
)
SCHEDULER_NEEDS = (("scheduler_config.json",),)
T5_ENCODER = ComponentSpec("transformers", ("T5EncoderModel",), T5)
IMAGE_VAE = ComponentSpec("diffusers", ("AutoencoderKL",), Vae)


def scheduler(*classes: str) -> ComponentSpec:
    """Make the spec of a scheduler. classes: names of those in diffusers that it may be, the usual one first."""
    return ComponentSpec("diffusers", classes, Scheduler, needs=SCHEDULER_NEEDS)
