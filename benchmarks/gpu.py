"""The denoisers at full size on a CUDA card: diffusers, diffusers compiled whole, and ours with each backend.

    python benchmarks/gpu.py [--models cogvideox-2b ...] [--stage steps fp16 rerun compile attention profile]

Random weights, made on the card: nothing is downloaded. Each stage is a process of its own and runs alone as well;
their figures come into one JSON and one table in --out.

steps       diffusers eager, torch.compile whole, ours with each backend, with the guard, with a learned island: bf16
fp16        diffusers and ours in fp16, where ours has a wide stream if the model has one; and ours plain
rerun       a step that fails and is computed again in fp32
compile     the first step's compiling: with an empty cache, and in a second process with the cache that it left
attention   PyTorch's attention kernels on the model's shapes, with their errors
profile     where a step's time goes, as text

--small runs tiny models on any machine, to try the script out: its figures mean nothing.
"""

from __future__ import annotations

import sys

import harness
import torch
from denoisers import MODELS


def main() -> None:
    parser = harness.arguments(__doc__, MODELS, harness.STAGES)
    parser.add_argument("--small", action="store_true", help="tiny models, on a CPU too")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        sys.exit(
            f"No CUDA card: torch {torch.__version__} sees none, and full-size denoisers need one. Run this on a "
            "machine with one and a CUDA build of torch 2.9 or newer, try it out with --small, or take "
            "benchmarks/compiled.py, which is for CPUs."
        )
    harness.measure("gpu", args, "tiny" if args.small else "full")


if __name__ == "__main__":
    main()
