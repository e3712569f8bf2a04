"""ComfyUI's flags on memory and precision, and the effect of each on this pack's pipelines.

ComfyUI applies all of them to its own models, also under the NaN Guard. A pipeline's components are diffusers modules
under ComfyUI's memory manager: flags of the manager apply to them, flags of ComfyUI's own layers and loaders do not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..pipelines.insight.diagnosis import Flag

HONOURED = "honoured"  # ComfyUI or PyTorch applies it to pipelines too
MAPPED = "mapped"  # this pack reads it
NO_EFFECT = "no effect"

_WISHES = {"lowvram": "group", "novram": "sequential", "highvram": "none", "gpu_only": "none"}
_SET_BY = {"fp16_unet": "force_fp16", "cache_classic": "high_ram"}  # flag → the flag with which ComfyUI sets it


class Row(NamedTuple):
    """Flags with the same effect. A flag that takes a choice is followed by the choice."""

    names: tuple[str, ...]
    effect: str
    here: str  # the effect in this pack's pipelines, or the setting to use instead
    native: str = ""  # a remark on ComfyUI's own models under the NaN Guard; "" for none


def _none(here: str, *names: str, native: str = "") -> Row:
    return Row(names, NO_EFFECT, here, native)


def _precision(dtype: str, node: str, name: str, *, wider: bool = False) -> Row:
    """Return the row of a precision flag. wider: precision 'auto' follows the flag too, if it is fp32."""
    under = "'inherit' and 'auto'" if wider and dtype == "fp32" else "'inherit'"
    native = f"applies with NaN Guard's precision {under}; other values replace it"
    return _none(f"choose precision '{dtype}' at {node}", name, native=native)


_DTYPES = ("fp32", "fp16", "bf16")


_STAYS = (
    "the text encoder stays on the card after use if the rest of the model fits too, unless the loader's offload is "
    "'model', 'group' or 'sequential'"
)
_ATTENTION = "diffusers' models use PyTorch's attention: choose its kernel with attention in OneDiff Compile"
_ATTENTION_OF_RERUNS = (
    "overflow protection uses PyTorch's, and so does an fp32 rerun if the kernel supports only half precision"
)
_DYNAMIC = "dynamic VRAM is for ComfyUI's own models: choose the loader's offload instead"
_CACHED = (
    "a pipeline's weights are freed with the cached results that use it; the last pipeline's stay until ComfyUI "
    "unloads models"
)

ROWS = (
    # --- memory
    Row(("--reserve-vram",), HONOURED, "ComfyUI keeps it free when it makes room for a component or a call"),
    Row(("--disable-smart-memory",), HONOURED, "ComfyUI moves all else off the card when it loads a component"),
    Row(("--lowvram",), MAPPED, "the loader's offload 'auto' starts with 'group'; other values are unchanged"),
    Row(("--novram",), MAPPED, "the loader's offload 'auto' means 'sequential'; other values are unchanged"),
    Row(("--highvram", "--gpu-only"), MAPPED, _STAYS),
    _none("the VAE runs on the card: choose tiling or a smaller chunk at Decode Latents", "--cpu-vae"),
    _none(
        "components are loaded as a whole; offload 'group' loads the next block on its own CUDA stream",
        "--async-offload",
        "--disable-async-offload",
    ),
    _none("offload 'group' page-locks weights: choose 'sequential', which does not", "--disable-pinned-memory"),
    _none(_DYNAMIC, "--enable-dynamic-vram", "--disable-dynamic-vram", "--disable-nvml-pressure", "--fast-disk"),
    _none("dynamic VRAM is for ComfyUI's own models: choose --reserve-vram", "--vram-headroom"),
    Row(("--cache-classic", "--cache-lru", "--cache-none", "--cache-ram"), HONOURED, _CACHED),
    # --- precision
    *(_precision(dtype, "the loader", f"--force-{dtype}", wider=True) for dtype in _DTYPES),
    *(_precision(dtype, "the sampler", f"--{dtype}-unet", wider=True) for dtype in _DTYPES),
    _none(
        "no pipeline computes in fp64: choose precision 'fp32' at the sampler",
        "--fp64-unet",
        native="NaN Guard (native) refuses models that compute in fp64",
    ),
    _none(
        "choose precision 'fp8' at the sampler to multiply in fp8, or the loader's offload 'group' to save memory",
        *("--fp8_e4m3fn-unet", "--fp8_e5m2-unet", "--fp8_e8m0fnu-unet"),
    ),
    _none(
        "text encoders do not support fp8 weights: choose the loader's offload 'group' or 'sequential'",
        *("--fp8_e4m3fn-text-enc", "--fp8_e5m2-text-enc"),
    ),
    *(_precision(dtype, "Decode Latents", f"--{dtype}-vae") for dtype in _DTYPES),
    *(_none(f"choose precision '{dtype}' at Encode Prompt", f"--{dtype}-text-enc") for dtype in _DTYPES),
    _none("choose precision 'fp8' at the sampler, on a card that has it", "--supports-fp8-compute"),
    Row(
        ("--force-channels-last",),
        MAPPED,
        "2D convolutions of UNets and VAEs use channels-last, as with OneDiff Compile's layout 'channels-last'",
    ),
    # --- kernels
    _none(
        _ATTENTION,
        *("--use-split-cross-attention", "--use-quad-cross-attention", "--use-sage-attention"),
        *("--use-flash-attention", "--use-ck-attention", "--disable-xformers"),
        native=_ATTENTION_OF_RERUNS,
    ),
    _none(
        "the guard also recomputes overflow in attention in fp32: choose precision 'fp32' for everything",
        *("--force-upcast-attention", "--dont-upcast-attention"),
    ),
    Row(
        ("--fast fp16_accumulation",),
        HONOURED,
        "off while a pipeline runs on a card where it is not known to be safe: the loader's accumulation 'fast' "
        "keeps it on, 'fp16' keeps it on if the first step is accurate with it",
        "off while a guarded model computes in fp16 on such a card",
    ),
    _none(
        "pipelines do not use ComfyUI's own layers: choose precision 'fp8' at the sampler",
        *("--fast fp8_matrix_mult", "--fast cublas_ops"),
        native="a rerun multiplies in fp32",
    ),
    _none(
        "it is for ComfyUI's own models",
        "--disable-comfy-compiler",
        native="its memory plan does not include what a guard keeps between calls, or steps that it recomputes or "
        "protects",
    ),
)


def given(options: Any, parser: Any = None) -> tuple[Flag, ...]:
    """Return the flags that ComfyUI was started with, in the order of the table, as its user would write them.

    options: the parser's result. parser: ComfyUI's parser, for the defaults; None if ComfyUI does not keep it.
    """
    found = ((row, _written(name, options, parser)) for row in ROWS for name in row.names)
    return tuple(Flag(written, row.effect, row.here, row.native) for row, written in found if written)


def wish(options: Any) -> str:
    """Return the offload that ComfyUI's flags ask for: "none", "group" or "sequential"; "" without such a flag."""
    return next((offload for flag, offload in _WISHES.items() if getattr(options, flag, False)), "")


def _written(name: str, options: Any, parser: Any) -> str:
    """Return a flag with its value; "" if it was not given."""
    flag, _, choice = name.partition(" ")
    key = flag.removeprefix("--").replace("-", "_")
    value = getattr(options, key, None)
    if choice:
        return name if choice in {each.value for each in value or ()} else ""
    if value == parser.get_default(key) if parser else not value:
        return ""
    if getattr(options, _SET_BY.get(key, ""), False):
        return ""
    if value is True:
        return flag
    return " ".join([flag, *(f"{number:g}" for number in (value if isinstance(value, list) else [value]))])
