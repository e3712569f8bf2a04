"""A small model's folder changed so that its denoiser leaves fp16's range apart from the residual stream, which is
float32 in fp16: nothing but the guard helps then, and what it learns."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

OVERFLOWING_BLOCK = "transformer_blocks.1"  # of which every layer has to be scaled, or run in fp32
UNITS = slice(8)  # few, since what they hand on is too small for fp16 to hold all its digits


def overflow_inside(folder: Path) -> Path:
    """Some hidden activations of one feed-forward reach 1e5 and more; what it writes to the stream stays as it was."""
    (file,) = (folder / "transformer").glob("*.safetensors")
    weights = load_file(file)
    weights[f"{OVERFLOWING_BLOCK}.ff.net.0.proj.weight"][UNITS] *= 2.0**17
    weights[f"{OVERFLOWING_BLOCK}.ff.net.2.weight"][:, UNITS] *= 2.0**-17
    save_file(weights, file, metadata={"format": "pt"})
    return folder
