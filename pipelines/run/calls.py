"""The calls of one network that a stage is made of: how many there will be, and which one runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...precision.shallow_copy import Make, replace_submodules, with_forward
from ...precision.shared import PROCESS_GATE
from ...trust.message import Message

CallTold = Callable[[int, int, str], None]  # calls done, calls in all, a line of text; may raise, to interrupt

_NETWORKS = ("encoder", "decoder")
_CONVOLUTIONS = ("quant_conv", "post_quant_conv")  # between a network and the latents; some VAEs have none


@dataclass
class Calls:
    """Tells each call of a stage before it runs, and when the last one is done: an interrupt waits for one at most,
    and so do other threads that want to load."""

    what: str  # a Message's template: "decoding {} of {}", of a call and how many there are
    told: CallTold
    total: int = 0  # set before the first call
    done: int = 0

    def telling(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **kwargs: Any) -> Any:
            self._tell()
            PROCESS_GATE.yield_()
            made = call(*args, **kwargs)
            self.done += 1
            if self.done == self.total:
                self._tell()
            return made

        return told

    def tell(self, text: str) -> None:
        """Tell what takes long within a call."""
        self.told(self.done, self.total, text)

    def _tell(self) -> None:
        at = min(self.done + 1, self.total)
        self.told(self.done, self.total, Message(self.what, at, self.total))


def calls_of_vae(vae: torch.nn.Module, run: Callable[[Any], object]) -> int:
    """How many calls of its network a VAE's own loops over tiles, slices and chunks of frames make.

    run: is given a VAE of the same settings that computes nothing, and calls it with tensors on 'meta'.
    """
    count = 0

    def network(x: torch.Tensor, *_: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        made = x[..., :1, :1]  # the loops depend on the size of what goes in alone
        return (made, None) if "conv_cache" in kwargs else made

    shells: dict[str, Make] = {name: lambda module: with_forward(module, network) for name in _NETWORKS}
    for name in _CONVOLUTIONS:
        if getattr(vae, name, None) is not None:
            shells[name] = lambda module: with_forward(module, lambda x: x)
    run(replace_submodules(vae, shells))
    return count
