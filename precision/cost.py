"""What a rerun costs in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch


@contextmanager
def extra_peak(owner: object) -> Generator[Callable[[], int | None]]:
    """Yields a function that tells, afterwards, how many bytes were allocated at the peak beyond what was there before.

    Measured on CUDA, whose peak counter it resets. Elsewhere nobody counts, and it is the largest layer's weights in
    float32, which is what a rerun adds to its activations; None where `owner` is no module.
    """
    module = owner if isinstance(owner, torch.nn.Module) else None
    devices = {p.device for p in module.parameters() if p.is_cuda} if module else set()
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    for device in devices:
        torch.cuda.reset_peak_memory_stats(device)
    extra = None if devices or module is None else largest_layer(module)
    yield lambda: extra
    if devices:
        extra = sum(torch.cuda.max_memory_allocated(device) - before[device] for device in devices)


def largest_layer(module: torch.nn.Module) -> int:
    """Bytes of the largest layer's own weights in float32."""
    return 4 * max(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules())
