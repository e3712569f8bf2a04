"""NaN Guard (native) on ComfyUI's further VAEs: for pictures, videos, sound and 3D shapes, as small as possible."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from guard_vae import guarded, run
from guard_video_vae import _called_with
from in_comfyui import texts
from native_layouts import sizes
from native_models import CARD, VAE_SETTINGS, random_weights

if not hasattr(import_module("comfy.supported_models"), "Krea2"):
    pytest.skip("an older ComfyUI lacks most of these", allow_module_level=True)


class Kind(NamedTuple):
    network: str  # its class in comfy
    smaller: Mapping[str, Any]  # a class in the same module → its arguments, or a name → its value
    hot: tuple[str, str]  # weights that make fp16 overflow, of the decoder and the encoder
    latents: tuple[int, ...]
    given: tuple[int, ...] = ()  # what it encodes, channels last; (): no test does
    prefix: tuple[str, str] = ("", "")  # of weights in the network, and what comes before it in checkpoints


PICTURE = VAE_SETTINGS | sizes(z_channels=32, batch_norm_latent=True)
FLUX2 = {"AutoencoderKL": sizes(ddconfig=PICTURE, decoder_ddconfig=PICTURE, embed_dim=32)}
SEEDVR2 = {"BYTEDANCE_BLOCK_OUT_CHANNELS": (32,) * 4}
MAGE = {"DConvEncoder": sizes(hidden_size=64, num_blocks=2, head_size=64, num_head_blocks=1), "YEmbedder": sizes(ch=64)}
MAGE |= {"DConvDenoiser": sizes(hidden_size=64, num_blocks=4, num_cond_blocks=2)}
SHAPE = {"ShapeVAE": sizes(width=64, heads=2, num_decoder_layers=2, num_encoder_layers=1, num_latents=16, pc_size=64)}
OOBLECK = {"AudioOobleckVAE": sizes(channels=16, c_mults=[1, 2, 2, 2, 2])}
SA3 = {"SA3AudioVAE": sizes(channels=32, transformer_depths=6, sinusoidal_blocks=0, decoder_conv_mapping=True)}
SA3["SA3AudioVAE"] |= sizes(chunk_size=32, chunk_midpoint_shift=True)
IN, TAE_IN = ("decoder.conv_in.weight", "encoder.conv_in.weight"), ("decoder.1.weight", "encoder.0.weight")
MIX = ("decoder_model.y_embedder_x.weight", "dconv_encoder.blocks.1.conv5.weight")
GAIN, QKV = "layers.0.parametrizations.weight.original0", "transformers.5.self_attn.to_qkv.weight"
GAINS, QKVS = (f"decoder.{GAIN}", f"encoder.{GAIN}"), (f"decoder.layers.3.{QKV}", f"encoder.layers.0.{QKV}")
STUDENT, ROW = ("dconv_encoder.", "student."), (1, 16, 16, 3)
KINDS = {
    "flux2": Kind("sd.AutoencoderKL", FLUX2, IN, (1, 128, 2, 2), (1, 32, 32, 3)),
    "seedvr2": Kind("ldm.seedvr.vae.VideoAutoencoderKLWrapper", SEEDVR2, IN, (1, 16, 1, 2, 2), ROW),
    "mage": Kind("ldm.mage_flow.vae.MageVAE", MAGE, MIX, (1, 128, 2, 2), (1, 32, 32, 3), STUDENT),
    "hunyuan3d": Kind("ldm.hunyuan3d.vae.ShapeVAE", SHAPE, ("post_kl.weight", ""), (1, 64, 16)),
    "stable_audio": Kind("sd.AudioOobleckVAE", OOBLECK, GAINS, (1, 64, 2), (1, 2048, 2)),
    "stable_audio_3": Kind("ldm.audio.vae_sa3.SA3AudioVAE", SA3, QKVS, (1, 256, 4), (1, 8192, 2)),
    "tae_wan22": Kind("taesd.taehv.TAEHV", {"TAEHV": sizes(latent_channels=48)}, TAE_IN, (1, 48, 1, 1, 1), ROW),
}
CASES = [(name, part) for name in KINDS for part in ("decode", "encode") if part == "decode" or KINDS[name].given]
AT_LEAST_1 = ("running_var", "running_std", "norm.alpha")  # divisors, and the slopes of Stable Audio 3's norms


@torch.inference_mode()
def make(kind: Kind, dtype: torch.dtype, *, hot: bool) -> Any:
    """Make ComfyUI's VAE from a checkpoint with random weights that fp16 holds."""
    where, _, name = f"comfy.{kind.network}".rpartition(".")
    with ExitStack() as smaller:
        for each, given in kind.smaller.items():
            plain = getattr(import_module(where), each)
            value = partial(_called_with, plain, given) if isinstance(given, dict) else given
            smaller.enter_context(patch.object(import_module(where), each, value))
        stored = random_weights(getattr(import_module(where), name)(), {})
        for each in stored:
            if each.endswith(AT_LEAST_1):
                stored[each] = 1 + stored[each].abs()
            if hot and each in kind.hot:
                stored[each] *= 3e4 / stored[each].abs().max()
        start, before = kind.prefix
        rounded = {
            (before if start and each.startswith(start) else "") + each: stored[each].half().float() for each in stored
        }
        return import_module("comfy.sd").VAE(sd=rounded, device=CARD, dtype=dtype)


def call(kind: Kind, part: str, vae: Any) -> torch.Tensor:
    torch.manual_seed(1)  # some add noise
    random = torch.Generator().manual_seed(3)
    if part == "encode":
        return run(lambda vae: vae.encode(torch.randint(257, kind.given, generator=random) / 256), vae)
    latents = torch.randn(kind.latents, generator=random).half().float()
    grid = {} if kind.given else {"vae_options": {"octree_resolution": 8}}
    return run(lambda vae: vae.decode(latents, **grid), vae)


@pytest.mark.parametrize(("name", "part"), CASES)
def test_overflowing_vae_is_recomputed_bit_equal_to_fp32(name: str, part: str) -> None:
    of = partial(call, KINDS[name], part)
    healthy = make(KINDS[name], torch.float16, hot=False)
    assert torch.equal(of(healthy), of(guarded(healthy))) and "1 part, fine" in texts[-1]
    hot = make(KINDS[name], torch.float16, hot=True)
    right, made = of(make(KINDS[name], torch.float32, hot=True)), of(guarded(hot))
    assert right.isfinite().all() and torch.equal(made, right) and "1 part, 1 recomputed in fp32" in texts[-1]
    in_bf16, protected = (of(guarded(hot, precision=precision)) for precision in ("bf16", "fp16"))
    assert (protected - right).norm() < (in_bf16 - right).norm() / 2
    assert "; overflow protection; 1 part, fine" in texts[-1]
