"""Measure how much compiling speeds up a step, and the compile time at the start: ours and diffusers', on a CPU.

    python scripts/benchmarks/compiled.py [--models cogvideox-2b ...] [--stage steps compile ...] [--rounds 20]

The denoisers of gpu.py in a size for CPUs, with random weights, in bf16, in the same stages and the same code.
scripts/benchmarks/measure.py explains the timing and noise (`diffusers again`).
"""

from __future__ import annotations

import harness

MODELS = ("cogvideox-2b",)
STAGES = ("steps", "rerun", "compile")


def main() -> None:
    parser = harness.arguments(__doc__, MODELS, STAGES)
    parser.set_defaults(seconds=3600)
    harness.measure("compiled", parser.parse_args(), "cut")


if __name__ == "__main__":
    main()
