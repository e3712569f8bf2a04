"""The denoisers at full size on a CUDA card: diffusers eager and compiled, and ours with each backend.

    python scripts/benchmarks/gpu.py [--models cogvideox-2b ...] [--stage steps fp16 stream ...]

Random weights, made on the card: nothing is downloaded. Each stage of each model is a process of its own that ends in
less than 8 minutes on an H100, with as many rounds as that allows; their figures come into one JSON and one table in
--out. Without options, it is the first of these for CogVideoX-2B. docs/benchmarks.md says what to run next.

steps       diffusers eager, compiled whole and by block; ours with each backend, guard: bf16
fp16        the same in fp16, ours with an fp32 residual stream if the model has one; ours plain; with fp16 accumulation
stream      fp16 with a residual stream that peaks at 5e5, which plain fp16 cannot hold; bf16 beside it
offload     group and sequential offload, diffusers' and ours
end_to_end  prompt, 10 steps and decode: our nodes' functions beside diffusers' call; what is moved, and peaks
compile     the first step's compiling: with an empty cache, and in a second process with the cache that it left
autotune    max-autotune-no-cudagraphs: diffusers' whole and by block, and ours
layout      2D convolutions in channels-last: SVD alone
rerun       a step that fails and is recomputed in fp32
attention   PyTorch's attention kernels on the model's shapes, with their errors
profile     where a step's time goes, as text

Errors are against one step of the same weights in strict fp32. --small runs tiny models on any machine, to try the
script out: its figures mean nothing, and go to a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import harness
import torch
from measure import RESULTS

MODELS, STAGES = ("cogvideox-2b",), ("steps",)


def main() -> None:
    parser = harness.arguments(__doc__, MODELS, STAGES)
    parser.add_argument("--small", action="store_true", help="tiny models, on a CPU too")
    args = parser.parse_args()
    if not args.small and not torch.cuda.is_available():
        sys.exit(
            f"No CUDA card: torch {torch.__version__} sees none, and full-size denoisers need one. Run this on a "
            "machine with one and a CUDA build of torch 2.9 or newer, try it out with --small, or take "
            "scripts/benchmarks/compiled.py, which is for CPUs."
        )
    if args.small and args.out == RESULTS:
        args.out = Path(tempfile.mkdtemp())
    harness.measure("gpu", args, "tiny" if args.small else "full")


if __name__ == "__main__":
    main()
