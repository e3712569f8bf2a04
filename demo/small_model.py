"""A small CogVideoX folder, made on the spot: real classes, real files, random weights.

What lies in the folder is what a published CogVideoX folder has (`model_index.json`, `tokenizer/spiece.model`,
`text_encoder/`, `transformer/`, `vae/`, `scheduler/`, safetensors), so `CogVideoXPipeline.from_pretrained` and the
nodes load it as they load the real thing. The demo, the tests and the benchmarks need no download.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DiffusionPipeline,
)
from torch import nn
from transformers import T5Config, T5EncoderModel

from . import flow_decoder, flow_denoiser
from .small_tokenizer import TEXT_LENGTH, train_tokenizer, write_json

Variant = Literal["2b", "5b", "1.5", "5b-i2v", "1.5-i2v"]
Overflow = Literal["none", "stream", "inside"]
Look = Literal["noise", "flow"]
Module = TypeVar("Module", bound=nn.Module)

HIDDEN_GAIN = 2.0**15  # of `overflow="inside"`
STREAM_PEAK = 5e5  # what `overflow="stream"` makes |residual stream| reach; fp16 ends at 65504
TIME_WIDTH = 64


@dataclass(frozen=True)
class VariantSpec:
    """What tells the published variants apart, apart from size. Source: their config.json files."""

    rotary: bool
    patch_size_t: int | None
    patch_bias: bool
    vae_scaling: float
    snr_shift: float
    from_image: bool = False  # the image's latents are 16 more input channels
    learned_positions: bool = False  # stored, and for the sample size alone
    ofs: bool = False  # the only one with an embedding of an offset, as wide as that of the time


_2B = VariantSpec(rotary=False, patch_size_t=None, patch_bias=True, vae_scaling=1.15258426, snr_shift=3.0)
_5B = VariantSpec(rotary=True, patch_size_t=None, patch_bias=True, vae_scaling=0.7, snr_shift=1.0)
_15 = VariantSpec(rotary=True, patch_size_t=2, patch_bias=False, vae_scaling=0.7, snr_shift=1.0)
VARIANTS: dict[Variant, VariantSpec] = {
    "2b": _2B,
    "5b": _5B,
    "1.5": _15,
    "5b-i2v": replace(_5B, from_image=True, learned_positions=True),
    "1.5-i2v": replace(_15, from_image=True, ofs=True),
}


def build_cogvideox(
    folder: Path,
    *,
    overflow: Overflow = "none",
    seed: int = 0,
    layers: int = 2,
    variant: Variant = "2b",
    heads: int = 4,
    head_dim: int = 16,
    width: int = 96,
    height: int = 64,
    frames: int = 9,
    dtype: torch.dtype = torch.float32,
    look: Look = "noise",
) -> Path:
    """Write a small CogVideoX pipeline to `folder` and return `folder`.

    The same arguments give the same bytes of weights. Nothing is left behind if it fails: the folder appears whole,
    by a rename of a temporary one beside it.

    folder: must not exist yet.
    overflow: "stream" makes the feed-forward of one block write |x| of about 5e5 into the residual stream: more than
        fp16 holds, so plain fp16 is NaN at each step; fp32 and bf16 are fine, and so is everything inside that block
        (attention, hidden activations, weights) in fp16. "inside", of look="flow": its hidden activations leave fp16's
        range too.
    layers, heads, head_dim: of the denoiser; its width is heads * head_dim. head_dim: a multiple of 16. look="flow"
        brings its own.
    variant: the two that end in "i2v" are image-to-video pipelines.
    width, height, frames: pixels and frames of the sample size noted in the config: the pipeline's default. As with the
        published ones, "5b-i2v" can make no other width and height, and the 1.5 ones no larger.
    dtype: of the stored weights.
    look: "noise" has random weights and decodes to grey noise; "flow" has the weights of flow_denoiser.py and
        flow_decoder.py and decodes to slowly flowing colours (variant "2b" only).

    Raises FileExistsError where `folder` is there already, ValueError for an unknown variant, a head_dim that rotary
    positions cannot split, a flow that isn't a "2b", or noise that overflows "inside".
    """
    if look == "flow":
        if variant != "2b":
            raise ValueError(f"look='flow' needs variant '2b', which has sinusoidal positions; got {variant!r}.")
        layers, heads, head_dim = 2, flow_denoiser.HEADS, flow_denoiser.HEAD_DIM
    elif overflow == "inside":
        raise ValueError("overflow='inside' needs look='flow'.")
    if variant not in VARIANTS:
        raise ValueError(f"Unknown CogVideoX variant {variant!r}. Choose one of {', '.join(VARIANTS)}.")
    if head_dim % 16:
        raise ValueError(f"head_dim is {head_dim}; 3D rotary positions need a multiple of 16.")
    with new_folder(folder) as temporary, torch.random.fork_rng(devices=[]):
        spec = VARIANTS[variant]
        tokenizer = train_tokenizer(temporary / "tokenizer")
        torch.manual_seed(seed)
        text_encoder = small_text_encoder()
        torch.manual_seed(seed + 1)  # a component's weights don't hang on how many numbers the one before drew
        transformer = CogVideoXTransformer3DModel(
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=32 if spec.from_image else 16,
            ofs_embed_dim=TIME_WIDTH if spec.ofs else None,
            text_embed_dim=text_encoder.config.d_model,
            time_embed_dim=TIME_WIDTH,
            num_layers=layers,
            sample_width=width // 8,
            sample_height=height // 8,
            sample_frames=frames,
            patch_size_t=spec.patch_size_t,
            patch_bias=spec.patch_bias,
            max_text_seq_length=TEXT_LENGTH,
            use_rotary_positional_embeddings=spec.rotary,
            use_learned_positional_embeddings=spec.learned_positions,
        )
        if spec.learned_positions:
            positions: Any = transformer.patch_embed.pos_embedding
            positions.add_(0.1 * torch.randn_like(positions))  # else those that the class computes for other sizes
        schedule = scheduler(spec)
        channels, groups = (flow_decoder.BLOCK_CHANNELS, 1) if look == "flow" else ((8, 16, 16, 16), 4)
        torch.manual_seed(seed + 2)
        vae = small_vae(spec, channels=channels, groups=groups)
        if look == "flow":
            peak = 10.0 if overflow == "none" else STREAM_PEAK
            more = {"hidden_gain": HIDDEN_GAIN} if overflow == "inside" else {}
            flow_denoiser.set_denoiser(transformer, schedule, peak=peak, **more)
            flow_decoder.set_decoder(vae)
        elif overflow == "stream":
            make_stream_overflow(transformer, ("norm2.linear", (2, 5)), lambda: step(transformer))
        pipeline_class = CogVideoXImageToVideoPipeline if spec.from_image else CogVideoXPipeline
        pipeline = pipeline_class(
            tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, vae=vae, scheduler=schedule
        )
        save(pipeline, temporary, dtype)
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`; it becomes `folder` when the block ends, and vanishes if it raises."""
    folder = Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} exists already. Choose another place for the small model, or remove it first.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save(pipeline: DiffusionPipeline, folder: Path, dtype: torch.dtype, named: Mapping[str, str] | None = None) -> None:
    """Save as safetensors in `dtype`. A component whose folder is there already keeps the files in it: they are as
    published, whatever the installed version of transformers would write.

    named: component → its class in model_index.json, where the installed transformers calls it something else.
    """
    for module in pipeline.components.values():
        if isinstance(module, nn.Module):
            nn.Module.to(module, dtype)  # not diffusers' own `to`, which warns of modules to be kept in float32: none
    published = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    pipeline.save_pretrained(folder, safe_serialization=True)
    for component in {path.parent for path in published}:
        for path in component.iterdir():
            path.unlink()
    for path, content in published.items():
        path.write_bytes(content)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    for component, name in (named or {}).items():
        index[component][1] = name
    write_json(folder / "model_index.json", index)


def small_text_encoder() -> T5EncoderModel:
    """A T5 v1.1 encoder (gated GELU), 32 wide, two layers; the same weights under each version of transformers."""
    encoder = T5EncoderModel(
        T5Config(
            vocab_size=384,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
        )
    )
    return draw_weights(encoder)


def draw_weights(module: Module) -> Module:
    """Draw all matrices anew, in the order of their names: how a version of transformers draws them doesn't matter.

    Biases and the weights of norms stay 0 and 1.
    """
    generator = torch.Generator().manual_seed(torch.initial_seed())
    with torch.no_grad():
        for name, weight in sorted(module.named_parameters()):
            if weight.ndim > 1 or name.endswith("class_embedding"):
                words = name.endswith(("shared.weight", "embed_tokens.weight"))
                spread = 1.0 if words or weight.ndim == 1 else weight[0].numel() ** -0.5
                weight.copy_(spread * torch.randn(weight.shape, generator=generator))
    return module.eval()


def small_vae(spec: VariantSpec, *, channels: tuple[int, ...], groups: int) -> AutoencoderKLCogVideoX:
    """Four levels as the real one has: 8 times smaller in space, 4 times in time, 16 latent channels.

    Its sample size makes tiles (half of it) whose overlaps are whole latents, as the real one's are; else diffusers
    decodes tiles to frames of another size.
    """
    levels: dict[str, Any] = {  # diffusers annotates them as tuples of one
        "block_out_channels": channels,
        "down_block_types": ("CogVideoXDownBlock3D",) * len(channels),
        "up_block_types": ("CogVideoXUpBlock3D",) * len(channels),
    }
    return AutoencoderKLCogVideoX(
        **levels,
        layers_per_block=1,
        norm_num_groups=groups,
        sample_width=160,
        sample_height=96,
        scaling_factor=spec.vae_scaling,
        invert_scale_latents=spec.patch_size_t is not None,
    ).eval()


def scheduler(spec: VariantSpec) -> CogVideoXDDIMScheduler:
    return CogVideoXDDIMScheduler(
        beta_schedule="scaled_linear",
        beta_start=0.00085,
        beta_end=0.0120,
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        set_alpha_to_one=True,
        snr_shift_scale=spec.snr_shift,
        timestep_spacing="trailing",
    )


def make_stream_overflow(
    transformer: nn.Module,
    gates: tuple[str, tuple[int, int]],
    run: Callable[[], object],
    *,
    peak: float = STREAM_PEAK,
) -> None:
    """Scale one block's feed-forward output weights until |residual stream| after it reaches `peak` (in place).

    The feed-forward's hidden activations are made larger too (tens, not thousands), so that the output weights
    themselves stay far below fp16's largest number.

    gates: which linear layer of the block computes the feed-forward's gates, and which chunks of its output they are,
        the picture's and the text's.
    run: one step of the transformer.
    """
    blocks: Any = transformer.get_submodule("transformer_blocks")
    block = blocks[(len(blocks) - 1) // 2]
    width = block.ff.net[2].out_features
    gate, chunks = block.get_submodule(gates[0]), gates[1]
    with torch.no_grad():
        block.ff.net[0].proj.weight.mul_(8.0)
        for chunk in chunks:  # no small gate that only a huge weight could make up for
            gate.bias[chunk * width : (chunk + 1) * width].fill_(1.0)
        transformer.eval()
        for _ in range(2):
            block.ff.net[2].weight.mul_(peak / _stream_peak(block, run))


def _stream_peak(block: nn.Module, run: Callable[[], object]) -> float:
    """The smaller of max |picture's stream| and max |text's stream| after `block`."""
    peaks: list[float] = []

    def note(_module: nn.Module, _args: object, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        peaks.append(min(stream.abs().max().item() for stream in output))

    handle = block.register_forward_hook(note)
    try:
        run()
    finally:
        handle.remove()
    return peaks[0]


def step(transformer: CogVideoXTransformer3DModel) -> None:
    """One step from random latents of the sample size."""
    config: Any = transformer.config
    frames, height, width = 2 * (config.patch_size_t or 1), config.sample_height, config.sample_width
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, frames, config.in_channels, height, width, generator=generator)
    text = torch.randn(1, config.max_text_seq_length, config.text_embed_dim, generator=generator)
    rotary = None
    if config.use_rotary_positional_embeddings:
        tokens = 2 * (height // 2) * (width // 2)
        rotary = (torch.ones(tokens, config.attention_head_dim), torch.zeros(tokens, config.attention_head_dim))
    ofs = torch.full((1,), 2.0) if config.ofs_embed_dim else None
    transformer(latents, text, torch.tensor([500]), ofs=ofs, image_rotary_emb=rotary)
