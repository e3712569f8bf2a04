"""Time the denoisers at full size on a CUDA card: diffusers eager and compiled, and ours with each backend.

    python scripts/benchmarks/gpu.py [--models cogvideox-2b ...] [--stage steps fp16 stream ...]

Weights are random and made on the card: nothing is downloaded. Each stage of each model runs in a separate process that
ends within 8 minutes on an H100, with as many rounds as fit. All figures go to one JSON file and one table in --out.
Without options, the stage is `steps` for CogVideoX-2B. docs/benchmarks.md says which stages to run next.

steps       bf16: diffusers eager, compiled whole and by block; ours with each backend, with and without the guard
fp16        the same in fp16: ours with overflow protection, in plain fp16, and with fp16 accumulation
stream      fp16 with a residual stream that peaks at 5e5, which overflows plain fp16; and bf16
offload     group and sequential offload, diffusers' and ours
end_to_end  prompt, 10 steps and decode: our nodes' functions and diffusers' call; bytes moved, and memory peaks
compile     compile time of the first step: with an empty cache, and in a second process with the filled cache
autotune    max-autotune-no-cudagraphs: diffusers' whole and by block, and ours
layout      2D convolutions in channels-last: SVD only
rerun       a step that fails and is recomputed in fp32
attention   PyTorch's attention kernels on the model's shapes, with their errors
profile     a profile of a step's time, as text

Errors are against one step of the same weights in strict fp32. --small runs tiny models on any machine, to test the
script: its figures mean nothing, and go to a temporary folder.
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
    parser.add_argument("--small", action="store_true", help="tiny models, also on a CPU")
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
