"""What compiling gains a step, and what it costs at the start: ours beside diffusers', on a CPU.

    python scripts/benchmarks/compiled.py [--models cogvideox-2b ...] [--stage steps compile ...] [--rounds 20]

The denoisers of gpu.py, cut down to a CPU's size, with random weights, in bf16: the same stages, in the same code.
How they are timed, and what noise is (`diffusers again`): scripts/benchmarks/measure.py.
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
