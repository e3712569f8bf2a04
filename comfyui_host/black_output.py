"""Tell the page of a run whose pictures came out non-finite or black, so that it can offer to run it again, guarded.

ComfyUI 0.33 and newer show each node's outputs to cache providers. Ours looks at them, and caches nothing.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

from . import host
from .guarded_prompt import computes, outputs_of, with_guards

NON_FINITE, BLACK = "non-finite", "black"
logger = logging.getLogger(__name__)


def watch(_server: Any) -> None:
    """Look at outputs, where this ComfyUI shows them."""
    caching: Any = getattr(sys.modules.get("comfy_api.latest"), "Caching", None)
    providers: Any = sys.modules.get("comfy_execution.cache_provider")
    if caching is None or providers is None:
        return
    look = _Look()

    class Watch(caching.CacheProvider):
        """Every method of it may be called from the thread that executes prompts, and raise nothing."""

        def should_cache(self, context: Any, value: Any = None) -> bool:
            if value is not None:
                look.at(context.node_id, context.class_type, value.outputs)
            return False

        async def on_lookup(self, context: Any) -> None:
            return None

        async def on_store(self, context: Any, value: Any) -> None:
            return None

        def on_prompt_start(self, prompt_id: str) -> None:
            look.found = None

        def on_prompt_end(self, prompt_id: str) -> None:
            look.tell(prompt_id)

    providers.register_cache_provider(Watch())


def problem_of(outputs: Any, types: Sequence[str]) -> str:
    """ "non-finite" or "black" of what a node put out; "" where nothing is wrong with it.

    outputs: a list for each slot. types: of the slots; pictures and latents are looked at. A sum shows whether a value
    is non-finite in a fraction of isfinite's time.
    """
    import torch

    for slot, kind in zip(outputs or (), types, strict=False):
        if kind not in ("IMAGE", "LATENT"):
            continue
        for item in slot if isinstance(slot, list) else [slot]:
            tensor = item.get("samples") if isinstance(item, dict) else item
            if not isinstance(tensor, torch.Tensor) or tensor.is_nested or not tensor.is_floating_point():
                continue
            total = tensor.sum(dtype=torch.float32).item() if tensor.numel() else 1.0
            if not math.isfinite(total) and not tensor.isfinite().all():
                return NON_FINITE
            if total == 0 and kind == "IMAGE" and not tensor.any():
                return BLACK
    return ""


class _Look:
    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None  # of this prompt: a node, and what is wrong with what it put out

    def at(self, node_id: str, class_type: str, outputs: Any) -> None:
        node = host.node_classes().get(class_type)
        if self.found is None and (wrong := problem_of(outputs, outputs_of(node))) and computes(node):
            self.found = node_id, wrong

    def tell(self, prompt_id: str) -> None:
        server, found = host.server(), self.found
        self.found = None
        if found is None:
            return
        node_id, wrong = found
        logger.warning("Node %s put out a result that is %s.", node_id, wrong)
        running = {item[1]: item[2] for item in server.prompt_queue.currently_running.values()}
        _, possible = with_guards(running.get(prompt_id) or {}, host.node_classes())
        if possible and server.client_id is not None:
            server.send_sync(
                "onediff_guard.black", {"prompt": prompt_id, "node": node_id, "problem": wrong}, server.client_id
            )
