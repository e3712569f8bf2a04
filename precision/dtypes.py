"""The three dtypes of a plan, by the names that people use."""

from __future__ import annotations

from functools import cache

import torch

DTYPES: dict[str, torch.dtype] = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
FP16_MAX: float = torch.finfo(torch.float16).max  # 65504
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name, such as "fp16" for torch.float16. One that no plan has is named as PyTorch writes it."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@cache
def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64: Apple's GPUs and some of Intel's refuse it."""
    try:
        torch.ones(1, dtype=torch.float64, device=device)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):
        return False
    return True
