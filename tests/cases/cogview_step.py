"""One step of the small CogView3-Plus."""

from __future__ import annotations

from typing import Any

import torch


def cogview3_call(denoiser: torch.nn.Module) -> dict[str, Any]:
    """Arguments of one step: a guided batch of two 16×16 latents."""
    generator = torch.Generator().manual_seed(0)
    size = torch.tensor([[128.0, 128.0]] * 2)
    return {
        "hidden_states": torch.randn(2, 16, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(2, 12, 32, generator=generator),
        "timestep": torch.tensor([500, 500]),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros(2, 2),
        "return_dict": False,
    }
