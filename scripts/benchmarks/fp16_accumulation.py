"""Measure how much fp16 accumulation changes products and steps, with a model of tensor cores on a CPU.

    python scripts/benchmarks/fp16_accumulation.py [--networks cogvideox-2b ...] [--out DIR]

The model is in fp16_sums_on_cpu.py, which also lists its limits. Nothing is timed. `products`: one product of random
matrices for each inner size of published models, against float64. `networks`: one call of small networks of the
families with random weights, 512 to 640 wide, with the switch against without it, like the check in the first step of a
run. Errors are norms of differences, divided by the norm.
"""

from __future__ import annotations

import quantised
import torch
from comfyui_onediff_guard.precision.after_failure import build_half_precision_forward
from comfyui_onediff_guard.precision.layer_peaks import difference, floating
from comfyui_onediff_guard.precision.overrides import MAX_FP16_ERROR, NOTHING
from contestants import fp16_sums
from fp16_sums_on_cpu import CHUNK, a_card_with_fp16_sums
from measure import head, new_parser, write_json

CHUNKS = (CHUNK, 8, 4)
INNER = {  # of published models' linear layers
    "CogVideoX-2B, attention": 1920,
    "CogVideoX-5B, attention": 3072,
    "CogVideoX-2B, feed-forward": 7680,
    "CogVideoX-5B, feed-forward": 12288,
    "Wan 14B, feed-forward": 13824,
}


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--networks", nargs="*", default=[], help="networks of quantised.py (default: all)")
    args = parser.parse_args()
    with torch.no_grad():
        result = head("fp16_accumulation", torch.device("cpu")) | {
            "kernel": "a model of tensor cores on a CPU; no card's kernel was run",
            "speed": "not measured",
            "allowed": MAX_FP16_ERROR,
            "products": {name: of_product(size) for name, size in INNER.items()},
            "networks": {
                subject[0]: of_network(subject)
                for subject in quantised.subjects()
                if subject[0] in args.networks or not args.networks
            },
        }
    for name, errors in {**result["products"], **result["networks"]}.items():
        print(f"{name:28} " + ", ".join(f"{kind} {error:.5f}" for kind, error in errors.items()))
    print(f"written to {write_json(result, args.out, 'cpu')}")


def of_product(inner: int) -> dict[str, float]:
    """The error of one product, rounded to fp16 once and as each size of chunks rounds it."""
    generator = torch.Generator().manual_seed(inner)
    x, weight = torch.randn(256, inner, generator=generator), torch.randn(64, inner, generator=generator) / inner**0.5
    right = x.half().double() @ weight.half().double().t()
    made = {"fp32 sums": float(difference([right.half().double()], [right]))}
    for chunk in CHUNKS:
        with a_card_with_fp16_sums(chunk), fp16_sums():
            summed = torch.nn.functional.linear(x.half(), weight.half())
        made[f"{chunk} at a time"] = float(difference([summed.double()], [right]))
    return made


def of_network(subject: quantised.Subject) -> dict[str, float]:
    """How far a step is changed, by each size of chunks."""
    _, family, make, arguments = subject
    single = make(torch.float32)
    given = quantised.cast(arguments(single.config, 0), family, torch.float16)
    module = quantised.denoisers_in(single, torch.float16)
    scaled = family.variants[0].protected
    step = build_half_precision_forward(module, NOTHING, "fp16", all_layers_scaled=scaled).eager
    without, made = floating(step(**given)), {}
    for chunk in CHUNKS:
        with a_card_with_fp16_sums(chunk), fp16_sums():
            made[f"{chunk} at a time"] = float(difference(floating(step(**given)), without))
    return made


if __name__ == "__main__":
    main()
