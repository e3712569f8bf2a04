"""The spec of a model family: everything that differs between families. Each family has its own module, and `table`
finds its `FAMILIES`: a new family is a new module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from ...precision.policy import Component, Variant
from ...trust.foreign import Foreign
from ...trust.message import Message, shown
from ..errors import BadSize, LibraryFailed

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ComponentSpec:
    """One folder of a diffusers pipeline."""

    library: str  # "diffusers" or "transformers"
    classes: tuple[str, ...]  # accepted in model_index.json; the first is the usual one
    fields: tuple[str, ...] = ()  # the fields of its config that are used; (): all that its classes take
    needs: tuple[tuple[str, ...], ...] = ()  # only without weights: groups of files, one or more needed of each
    reads: tuple[str, ...] = ()  # optional files. No others are read

    @property
    def weights(self) -> bool:
        return not self.needs

    @property
    def files(self) -> tuple[str, ...]:
        """The files of a component without weights."""
        return (*(name for group in self.needs for name in group), *self.reads)

    def class_named(self, name: str = "") -> Any:
        """Return a class of its library: the usual one where none is named, or where the installed version has none of
        this name. Raises LibraryFailed where the library cannot be imported."""
        try:
            import diffusers
            import transformers

            library = {"diffusers": diffusers, "transformers": transformers}[self.library]
            return getattr(library, name, None) or getattr(library, self.classes[0])
        except Exception as error:
            raise LibraryFailed(
                "{} cannot be imported ({}: {}). Install requirements.txt of this pack again, and unset "
                "PYTHONOPTIMIZE: at 2, Python removes docstrings that the library reads.",
                *(self.library, type(error).__name__, shown(str(error), 300)),
            ) from error

    def defaults(self, name: str = "") -> dict[str, Any]:
        """Return {used field of its config: the class's default, None if there is none}. Raises LibraryFailed."""
        if self.fields and not self.weights:
            return dict.fromkeys(self.fields)
        found: dict[str, Any] = {}
        for known in (*self.classes, name):  # one scheduler reads another's config
            cls = self.class_named(known)
            taken = signature(getattr(cls, "config_class", cls).__init__).parameters.items()
            found |= {field: it.default for field, it in taken if it.default is not Parameter.empty}
        return {field: found.get(field) for field in self.fields} if self.fields else found

    def on_meta(self, config: Mapping[str, Any], dtype: torch.dtype | None = None) -> torch.nn.Module:
        """Build the module of a config on the meta device, where it takes no memory.

        dtype: the dtype of its weights, as if loaded in it; None leaves them as the class makes them.
        """
        import torch

        from ...precision.loaded_weights import as_loaded

        cls = self.class_named()
        with torch.device("meta"):
            if self.library == "transformers":
                module = cls(cls.config_class.from_dict(dict(config)))
            else:
                module = cls.from_config(dict(config))
        torch.nn.Module.to(module, "meta")  # tensors that the class made on another device
        return as_loaded(module, dtype) if dtype else module


_T5_FIELDS = (
    *("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads"),
    *("relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate", "layer_norm_epsilon"),
    *("initializer_factor", "feed_forward_proj", "dense_act_fn", "is_gated_act", "tie_word_embeddings"),
    *("pad_token_id", "eos_token_id"),
)
TOKENIZER_FIELDS = ("extra_ids", "legacy", "add_bos_token", "add_eos_token")  # each of T5's extra ids becomes a token
TOKENIZER_ALSO = ("special_tokens_map.json", "added_tokens.json")
T5_TOKENIZER = ComponentSpec(
    "transformers",
    ("T5Tokenizer", "T5TokenizerFast"),
    TOKENIZER_FIELDS,
    needs=(("tokenizer_config.json",), ("spiece.model", "tokenizer.json")),
    reads=TOKENIZER_ALSO,
)


def t5_encoder(name: str) -> ComponentSpec:
    """Return the spec of a text encoder of T5's kind. name: its class in transformers."""
    return ComponentSpec("transformers", (name,), _T5_FIELDS)


def diffusers_model(name: str) -> ComponentSpec:
    """Return the spec of a denoiser or a VAE. name: its class in diffusers."""
    return ComponentSpec("diffusers", (name,))


def scheduler(*classes: str) -> ComponentSpec:
    """Return the spec of a scheduler. classes: its accepted classes in diffusers, the usual one first."""
    return ComponentSpec("diffusers", classes, needs=(("scheduler_config.json",),))


IMAGE = (Component.TEXT_ENCODER, Component.DENOISER, Component.VAE_DECODE)
VIDEO = (Component.TEXT_ENCODER, Component.VAE_ENCODE, Component.DENOISER, Component.VAE_DECODE)
FROM_IMAGE = (Component.IMAGE_ENCODER, Component.VAE_ENCODE, Component.DENOISER, Component.VAE_DECODE)
PROMPT = "encoder_hidden_states"  # a denoiser's argument, which diffusers' loops pass unchanged at every step
ROTARY = "image_rotary_emb"  # another argument: tables with a row for each token, without a batch dimension
ENCODERS = ("image_encoder", "vae")  # components that encode the start image or video


Config = Mapping[str, Any]
Decode = Callable[..., "torch.Tensor"]  # the guarded VAE: latents, options → video or images


def spatial_factor(config: Config) -> int:
    """Return the pixels along a latent's side, for a VAE of AutoencoderKL's kind."""
    return 2 ** (len(config.get("block_out_channels", (1, 1, 1, 1))) - 1)


def decoded_video(vae: Decode, latents: torch.Tensor, _chunk: int) -> Iterator[torch.Tensor]:
    """Decode latents in one call of the VAE, to [batch · frames, 3, height, width]."""
    yield vae(latents).permute(0, 2, 1, 3, 4).flatten(0, 1)


@dataclass(frozen=True)
class Layout:
    """A family's layout of latents. On wires they are unscaled, as a VAE takes them and as in ComfyUI's own nodes."""

    unscaled: Callable[[torch.Tensor, int, Config], torch.Tensor]  # (sampler's latents, frames, VAE config) → latents
    # (VAE, latents, chunk) → pictures [n, 3, height, width] each
    decoded: Callable[[Decode, torch.Tensor, int], Iterator[torch.Tensor]] = decoded_video
    dimensions: int = 5  # number of the latents' dimensions
    shape: str = "[batch, {channels}, frames, height, width]"  # the latents' shape in words, for error messages
    counts_frames: bool = True  # whether they are a video's, not images'
    channels: Callable[[Config], int] = lambda config: config.get("latent_channels", 16)  # VAE config → latent channels
    spatial: Callable[[Config], int] = spatial_factor  # VAE config → pixels along a latent's side
    temporal: Callable[[Config], int] = lambda _config: 1  # VAE config → frames per latent frame
    surplus: Callable[[int, Config], int] = lambda _latents, _config: 0  # (latent frames, VAE config) → surplus
    # frames that the VAE makes of them, in front
    takes_chunks: bool = False  # `decoded` can decode in chunks of frames or images
    cache: str = ""  # argument of the VAE's networks that carries a cache from one chunk of a video to the next
    cache_is_written: bool = False  # the networks write to that argument, a list; else they return a new cache

    def latents_shape(self, vae_config: Config, width: int, height: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of the latents of one video or image of that size, as the VAE decodes them."""
        pixels, channels = self.spatial(vae_config), self.channels(vae_config)
        count, sides = (frames - 1) // self.temporal(vae_config) + 1, (height // pixels, width // pixels)
        return (count, channels, *sides) if self.dimensions == 4 else (1, channels, count, *sides)


def without_values(**shapes: tuple[int, ...]) -> dict[str, Any]:
    """Return a tensor of each shape, in float32, on "meta"."""
    import torch

    return {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}


IMAGES = Layout(
    unscaled=lambda latents, _frames, config: latents / config["scaling_factor"],
    decoded=lambda vae, latents, chunk: map(vae, latents.split(chunk or len(latents))),
    dimensions=4,
    shape="[batch, {channels}, height, width]",
    counts_frames=False,
    takes_chunks=True,
)


@dataclass(frozen=True)
class SizeRule:
    """The sizes of pictures and videos that a family can make."""

    pixel_multiple: int  # of width and height
    frame_multiple: int = 1  # frames = frame_multiple · k + 1
    pixels: tuple[int, int] = (16, 4096)  # least and most width and height
    frames: tuple[int, int] = (1, 1025)

    def most_frames(self, frames: int) -> int:
        """Return the largest possible number of frames up to `frames`."""
        return max(1, frames - (frames - 1) % self.frame_multiple)

    def check(self, **sizes: int) -> None:
        """Raise BadSize, with the nearest valid value, for the first size that is invalid."""
        for name, value in sizes.items():
            step, offset, (least, most) = (
                (self.frame_multiple, 1, self.frames) if name == "frames" else (self.pixel_multiple, 0, self.pixels)
            )
            good = min(max(round((value - offset) / step) * step + offset, least), most)
            if value != good:
                rule = Message("{}·k + {} from", step, offset) if offset else Message("a multiple of {} from", step)
                rule = Message("from") if step == 1 else rule
                raise BadSize("{} is {}, but must be {} {} to {}. Nearest: {}.", name, value, rule, least, most, good)


@dataclass(frozen=True)
class PromptRule:
    """How a family's prompts are encoded."""

    tokens: Callable[[Config], int]  # denoiser config → most tokens of a prompt
    channels: Callable[[Config], int]  # denoiser config → channels of an embedding
    fixed: bool = True  # padded to that number of tokens; else as long as the prompt
    masked: bool = False  # whether the text encoder gets a mask of the padding
    no_negative_is_zero: bool = False  # whether an empty negative prompt's embedding is zeros, not the text encoder's


@dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance, which applies if its scale is above 1."""

    calls: int = 1  # calls of the denoiser in a step: 1 with both halves as a batch, or 2
    argument: str = "guidance_scale"  # the pipeline's argument for the scale
    first: str = ""  # its argument for the first frame's scale, if the scale grows from frame to frame


@dataclass(frozen=True)
class ContextPlan:
    """How ranks share a call of the denoiser: which arguments are split by tokens.

    Each rank computes its share of the tokens. Only attention needs the other ranks' tokens.
    """

    tokens: Callable[[Config, tuple[int, ...]], int]  # (denoiser config, shape of its `hidden_states`) → the blocks'
    # arguments of the first block that are split, with the dimension of the tokens; later blocks get its split output
    first: Mapping[str, int]
    every: Mapping[str, int] = field(default_factory=dict)  # the same of every block: arguments that each gets whole
    # the same of the denoiser: a timestep for each token; not split if it has one dimension
    given: Mapping[str, int] = field(default_factory=dict)
    text: str = ""  # the argument with text tokens, if they are split too


@dataclass(frozen=True)
class FamilySpec:
    """A family of models that share a diffusers pipeline."""

    name: str
    pipeline: str  # diffusers class
    components: Mapping[str, ComponentSpec]
    variants: tuple[Variant, ...]  # of this family, and of related ones in the same module
    variant: Callable[[Config], str]  # denoiser config → name of a variant
    layout: Layout
    # (denoiser config with its class's defaults, shape of the latents to be decoded, options of model_index.json) →
    # keyword arguments of the denoiser's first call in a step with guidance, as tensors in float32 on "meta"
    step_inputs: Callable[[Config, tuple[int, ...], Config], dict[str, Any]]
    sizes: SizeRule
    # (denoiser config, pixels along a latent's side) → the model's usual width, height and frames; 0: unknown
    usual_size: Callable[[Config, int], tuple[int, int, int]]
    # (denoiser config, pixels along a latent's side, width, height, frames) → which sizes a model makes; "": this one
    bound: Callable[[Config, int, int, int, int], str] = lambda *_: ""
    denoiser: str = "transformer"  # name of the component that denoises
    blocks: tuple[str, ...] = ("transformer_blocks",)  # its compiled parts, a list of blocks block by block
    denoiser_inputs: tuple[str, ...] = ("hidden_states", PROMPT)  # keyword arguments that carry activations
    also_denoise: tuple[str, ...] = ()  # further denoisers, which the pipeline calls for later timesteps
    extended: Mapping[str, FamilySpec] = field(default_factory=dict)  # further component → family of folders with it
    options: type[Foreign] = Foreign  # fields of model_index.json that the pipeline takes
    cached_blocks: str = ""  # ModuleList; the step cache skips all its blocks but the first; "": no step cache
    schedulers: Mapping[str, str] = field(default_factory=dict)  # user's choice → diffusers class; {}: the folder's own
    prompt: PromptRule | None = None  # None: no text encoder
    latent_format: Callable[[Config], str] = lambda _config: ""  # VAE config → ComfyUI's name of the latents; "": none
    takes_image: bool = False
    from_video: str = ""  # diffusers class that starts from a video; "": none
    # (frames, denoiser config, frames of a latent) → how often a video's first frame has to be repeated in front, which
    # the layout drops again
    before_video: Callable[[int, Config, int], int] = lambda *_: 0
    guidance: Guidance = Guidance()
    authors_names: tuple[tuple[str, str], ...] = ()  # (pattern in diffusers' name of a layer, its replacement in the
    # authors' name), applied in order
    image_layers: str = ""  # pattern of layers, under either name, that only image-to-video denoisers have
    context: ContextPlan | None = None  # how several GPUs share a call of the denoiser; None: they cannot

    @property
    def denoisers(self) -> tuple[str, ...]:
        """Names of the denoisers, in the order in which they are called."""
        return (self.denoiser, *self.also_denoise)

    def of(self, index: Mapping[str, object]) -> FamilySpec:
        """Return the family of a folder: one of `extended` if it has the component. index: its model_index.json."""
        return next(
            (family for name, family in self.extended.items() if index.get(name) not in (None, [None, None])), self
        )

    @property
    def weighted(self) -> tuple[str, ...]:
        return tuple(name for name, component in self.components.items() if component.weights)

    def folder(self, component: Component) -> str:
        """Return a component's folder, which is also its name in the diffusers pipeline."""
        if component in (Component.VAE_ENCODE, Component.VAE_DECODE):
            return "vae"
        return self.denoiser if component is Component.DENOISER else component.value
