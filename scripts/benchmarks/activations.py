"""Count the activation memory of published networks at full size, on tensors that have a shape but no values.

    python scripts/benchmarks/activations.py [--out scripts/benchmarks/results]

Denoisers: one step, with both halves of guidance if the model takes guidance. VAEs: one decode of the usual size, with
diffusers' own loops over tiles and chunks of frames. Attention counts as one kernel, without its workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
from comfyui_onediff_guard.precision.activation_estimate import META, counting, on_meta
from comfyui_onediff_guard.precision.kernels import LEAN, Kernels
from comfyui_onediff_guard.precision.planned_products import Scale
from comfyui_onediff_guard.precision.scaled_products import ScaledHalfMatmulMode
from comfyui_onediff_guard.precision.shallow_copy import replace_submodules, with_forward
from comfyui_onediff_guard.precision.upcast import run_in, run_in_fp32
from measure import head, new_parser, write_json
from networks import NETWORKS, Network
from random_pipeline import COGVIDEOX_VAE, SVD_VAE
from scaled_bytes import planned

HALF, SINGLE = torch.float16, torch.float32
UNFUSED = Kernels(attention=lambda *_, **__: "no fused attention")
UNFOLDED = Kernels(conv3d=lambda dtype: "no cuDNN for 3D convolutions in half precision" if dtype is HALF else "")


@dataclass(frozen=True)
class Decode:
    """A decode at the usual size."""

    kind: str  # diffusers class
    config: dict[str, Any]
    latents: tuple[int, ...]
    tiling: bool = False
    frames: int = 0  # frames that the decoder is called with


DECODES = {
    "CogVideoX, 49 frames 720×480": Decode("AutoencoderKLCogVideoX", COGVIDEOX_VAE, (1, 16, 13, 60, 90)),
    "the same in tiles": Decode("AutoencoderKLCogVideoX", COGVIDEOX_VAE, (1, 16, 13, 60, 90), tiling=True),
    "SVD-XT, 25 frames 1024×576": Decode("AutoencoderKLTemporalDecoder", SVD_VAE, (25, 4, 72, 128), frames=25),
    "the same, 8 frames at once": Decode("AutoencoderKLTemporalDecoder", SVD_VAE, (8, 4, 72, 128), frames=8),
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--networks", nargs="*", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--decodes", nargs="*", choices=DECODES, default=list(DECODES))
    parser.add_argument("--size", default="full", help="size of the networks, from networks.py")
    args = parser.parse_args()
    steps: dict[str, Any] = {}
    decodes: dict[str, Any] = {}
    result = head("activations", "none: counted, not run", diffusers=diffusers.__version__)
    result |= {"steps_gigabytes": steps, "decodes_gigabytes": decodes}
    for name in args.networks:
        told(NETWORKS[name].said, steps, step_of(NETWORKS[name], args.size))
    for name in args.decodes:
        told(name, decodes, decode_of(DECODES[name]))
    print(f"written to {write_json(result, args.out, 'paper')}")


def told(name: str, rows: dict[str, Any], found: dict[str, float]) -> None:
    rows[name] = found
    print(f"{name:45}", ", ".join(f"{what} {gigabytes:.3g}" for what, gigabytes in found.items()), flush=True)


def step_of(network: Network, size: str) -> dict[str, float]:
    module: Any = network.make(size, META, HALF)
    call = network.step(module.config, size, META, HALF)
    found = {"weights in half": sum(p.nbytes for p in module.parameters()) / 1e9}
    found["half"] = taken(lambda: module(**call))
    found["half, without fused attention"] = taken(lambda: module(**call), UNFUSED)
    found["fp16, every row scaled"] = taken(lambda: run_in(ScaledHalfMatmulMode(HALF), module, (), call))
    later = planned(module, call, Scale(fp16=True))
    found["fp16, learned scales with room"] = taken(lambda: run_in(later, module, (), call))
    found["rerun in fp32"] = taken(lambda: run_in_fp32(module, **call))
    return rounded(found)


def decode_of(decode: Decode) -> dict[str, float]:
    found = {}
    ways = (("half", HALF, LEAN), ("half, without cuDNN for Conv3d", HALF, UNFOLDED), ("fp32", SINGLE, LEAN))
    for name, dtype, kernels in ways:
        with META:
            vae: Any = getattr(diffusers, decode.kind)(**decode.config)
        vae = on_meta(torch.nn.Module.to(vae, dtype))  # some parts were created on the CPU
        more = {"num_frames": decode.frames} if decode.frames else {}
        with counting(kernels) as memory:
            once = memory.each_shape_once(vae.decoder.__call__)
            shell: Any = replace_submodules(vae, {"decoder": partial(_calling, once)})
            shell.use_tiling = decode.tiling
            shell.decode(torch.empty(decode.latents, dtype=dtype, device=META), **more)
        found[name] = memory.most / 1e9
    return rounded(found)


def _calling(call: Callable[..., Any], network: torch.nn.Module) -> torch.nn.Module:
    return with_forward(network, call)


def taken(call: Callable[[], Any], kernels: Kernels = LEAN) -> float:
    with counting(kernels) as memory:
        _ = call()
    return memory.most / 1e9


def rounded(found: dict[str, float]) -> dict[str, float]:
    return {name: round(gigabytes, 3) for name, gigabytes in found.items()}


if __name__ == "__main__":
    main()
