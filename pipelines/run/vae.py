"""The VAE for a pipeline: each call of its encoder or decoder is guarded.

A VAE calls its network once for each tile and chunk of frames, and a video's chunks pass on a cache. So a failure costs
one chunk in fp32: the first whose output or cache is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from ...precision.activation_estimate import ActivationMemoryMode, on_meta
from ...precision.after_failure import FallbackAdapter, HalfPrecisionForward, build_half_precision_forward
from ...precision.layer_peaks import block_names
from ...precision.overrides import PrecisionOverrides
from ...precision.shallow_copy import Make, copy_with_base, replace_submodules, reporting, with_forward
from ...precision.upcast import TF32, autocast_off_where_on, device_types, run_in_fp32
from ..compile.auto_compile import CallSignature, DecoderCompiler, signature_of
from ..weights.activation_memory import attempt_on_meta, counted
from ..weights.placement import ExecutionOption, OomFallback
from .stage import Calls, ComponentStage

_BLOCKS = ("down_blocks", "mid_block", "up_blocks")  # of diffusers' encoders and decoders


def guarded(stage: ComponentStage, part: str, calls: Calls, compiler: DecoderCompiler | None = None) -> Any:
    """Return a shallow copy of the VAE with its `part`, "encoder" or "decoder", guarded. calls: reports its calls.
    compiler: compiles some of them; None: none."""
    vae: Any = stage.module
    network = vae.get_submodule(part)
    writes = stage.handle.family.layout.cache_is_written
    pure = copy_with_base(network, _HandsOnItsCache) if writes else network
    made = _learning(stage, pure, compiler) if stage.plan.half else _in_fp32(stage, pure, compiler)
    guard = stage.guard(pure, made)
    call = calls.telling(_into_the_cache(guard) if writes else guard)
    return _with_call(vae, part, call)


def dry_run(
    stage: ComponentStage, part: str, given: torch.Tensor, run: Callable[[Any, torch.Tensor], object], *how: Hashable
) -> tuple[int, list[CallSignature]]:
    """Return the activation memory, in bytes, of encoding or decoding, and the signature of each call of the VAE's
    network, in order; 0 and [] if the estimate fails. Nothing is computed: it runs on "meta".

    part: "encoder" or "decoder". given: the input. run: calls a VAE with an input. how: further parts of the key.
    """
    what, known = (part, given.shape, *how), stage.handle.store.network_calls

    def prepare() -> Callable[[ActivationMemoryMode], object]:
        network, bare, bare_given = stage.module.get_submodule(part), on_meta(stage.module), on_meta(given)
        writes = stage.handle.family.layout.cache_is_written
        attempt = attempt_on_meta(stage, copy_with_base(network, _HandsOnItsCache) if writes else network)
        signatures: list[CallSignature] = []

        def count(memory: ActivationMemoryMode) -> None:
            once = memory.each_shape_once(attempt)

            def call(*args: Any, **kwargs: Any) -> Any:
                signatures.append(signature_of(*args, **kwargs))
                return once(*args, **kwargs)

            run(_with_call(bare, part, _into_the_cache(call) if writes else call), bare_given)
            known[stage.plan, what] = signatures

        return count

    return counted(stage, what, prepare), known.get((stage.plan, what), [])


def guarded_encoder(stage: ComponentStage, calls: Calls) -> Any:
    """Return a shallow copy of the VAE whose `encode` is guarded. calls: counts and reports the encoder's calls.

    Latents are drawn in float32, so that a seed draws the same in every precision. The copy reports float32 and
    asks for no upcast: diffusers would upcast the shared weights.
    """
    vae = guarded(stage, "encoder", calls)

    def encode(pixels: torch.Tensor) -> Any:
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        moments = stage.handle.ranks.broadcast_from_rank0(
            lambda: fallback.run(partial(moments_of, pixels), partial(ways, pixels))
        )
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(moments))  # pyright: ignore[reportArgumentType]

    def moments_of(pixels: torch.Tensor) -> torch.Tensor:
        takes, made = foreseen(pixels, vae.use_tiling)
        stage.place(lambda: takes)
        calls.total = calls.done + len(made)
        return vae.encode(pixels).latent_dist.parameters.float()

    def foreseen(pixels: torch.Tensor, tiling: bool) -> tuple[int, list[CallSignature]]:
        def encode(vae: Any, pixels: torch.Tensor) -> None:
            vae.use_tiling = tiling
            vae.encode(pixels)

        return dry_run(stage, "encoder", pixels, encode, tiling)

    def ways(pixels: torch.Tensor) -> Iterator[ExecutionOption]:
        for tiling in sorted({vae.use_tiling, hasattr(vae, "tiled_encode")}):
            said, take = "tiling" if tiling else "whole", partial(setattr, vae, "use_tiling", tiling)
            yield ExecutionOption(said, stage.weights_at_once(), foreseen(pixels, tiling)[0], take)

    fallback = OomFallback(stage)
    vae.use_tiling = False

    shell: Any = reporting(vae, dtype=torch.float32, device=stage.handle.store.placement.device)
    shell.encode = encode
    shell.register_to_config(force_upcast=False)
    return shell


def _in_fp32(stage: ComponentStage, network: torch.nn.Module, compiler: DecoderCompiler | None) -> Callable[..., Any]:
    """Return the network in fp32. Compiled calls compute like `run_in_fp32`, which itself runs eagerly."""

    @contextmanager
    def as_in_fp32() -> Generator[None]:
        with TF32.held(stage.tf32), autocast_off_where_on(device_types()):
            yield

    run = stage.in_fp32(network)
    return compiler.shell(network, run, as_in_fp32) if compiler else run


def _unwatched(network: torch.nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which dynamo can trace a network. It cannot trace Wan's decoder under a function mode, which
    the guard has on the CPU."""
    return torch._C.DisableTorchFunction() if isinstance(network, _HandsOnItsCache) else nullcontext()


def _with_call(vae: torch.nn.Module, part: str, call: Callable[..., Any]) -> Any:
    """Return a shallow copy of a VAE that calls `call` for its network `part`. Some VAEs have a 1×1 convolution between
    network and latents; it costs nothing and runs in fp32."""
    conv = {"encoder": "quant_conv", "decoder": "post_quant_conv"}[part]
    shells: dict[str, Make] = {part: lambda network: with_forward(network, call)}
    if getattr(vae, conv, None) is not None:
        shells[conv] = lambda module: with_forward(module, partial(run_in_fp32, module))
    return replace_submodules(vae, shells)


def _learning(stage: ComponentStage, network: torch.nn.Module, compiler: DecoderCompiler | None) -> FallbackAdapter:
    blocks = block_names(network, [name for name in _BLOCKS if getattr(network, name, None) is not None])

    def build(known: PrecisionOverrides) -> HalfPrecisionForward:
        scaled = known.all_layers_scaled or stage.plan.overflow_protection

        def whole(half: torch.nn.Module, *_: Any) -> torch.nn.Module:
            return compiler.shell(half, around=partial(_unwatched, half)) if compiler else half

        if compiler and scaled:
            compiler.leave("not compiled: overflow protection is on")
        options = {} if scaled else {"compiled": whole}
        return build_half_precision_forward(network, known, stage.plan.dtype, **options, **stage.numerics)

    return stage.learner(network, build, blocks=blocks)


class _HandsOnItsCache(torch.nn.Module):
    """A network that writes its cache into lists, as Wan's do, made a pure function: it takes and returns the cache, so
    that a chunk can be recomputed."""

    def forward(self, x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int], **options: Any) -> Any:
        """Return (output, feat_cache, feat_idx). The lists in the arguments are not changed."""
        cache, index = [*feat_cache], [*feat_idx]
        return super().forward(x, feat_cache=cache, feat_idx=index, **options), cache, index


def _into_the_cache(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a pure call for the VAE: it writes to the lists, and returns only the output."""

    def writing(x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int], **options: Any) -> torch.Tensor:
        output, feat_cache[:], feat_idx[:] = call(x, feat_cache=feat_cache, feat_idx=feat_idx, **options)
        return output

    return writing
