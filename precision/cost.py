"""What a rerun costs in memory."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from .observe import floating
from .peaks import peak_memory


@contextmanager
def extra_peak(owner: object, given: Any = ()) -> Generator[Callable[[], int | None]]:
    """Yield a function that returns, afterwards, how many bytes more were allocated at the peak than before.

    They are measured on CUDA. Elsewhere they are those of the largest layer's weights in float32, which is what a rerun
    adds to its activations; None where `owner` is no module.

    given: a nest of the tensors that are computed with; the owner's weights may be elsewhere until they are needed.
    """
    module = owner if isinstance(owner, torch.nn.Module) else None
    tensors = [*floating(given), *(module.parameters() if module else ())]
    devices = sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=str)
    before = {device: torch.cuda.memory_allocated(device) for device in devices}
    extra = None if devices or module is None else largest_layer(module)
    with ExitStack() as stack:
        peaks = {device: stack.enter_context(peak_memory(device)) for device in devices}
        yield lambda: extra
        if devices:
            found = {device: peak() for device, peak in peaks.items()}
            extra = sum(peak.used - before[device] for device, peak in found.items() if peak)


def largest_layer(module: torch.nn.Module) -> int:
    """Return how many bytes the largest layer's own weights take in float32."""
    return 4 * max(sum(p.numel() for p in layer.parameters(recurse=False)) for layer in module.modules())
