"""Tell the page of a run whose pictures came out non-finite or black, so that it can offer to run it again, guarded.

ComfyUI 0.33 and newer show each node's outputs to cache providers. Ours looks at them, and caches nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..precision.observe import floating
from . import host
from .every_workflow import computes, with_guards

NON_FINITE, BLACK = "non-finite", "black"
logger = logging.getLogger(__name__)


def install() -> None:
    """Look at outputs, where this ComfyUI shows them."""
    caching: Any = getattr(sys.modules.get("comfy_api.latest"), "Caching", None)
    if caching is None or host.server() is None:
        return
    from comfy_execution.cache_provider import register_cache_provider

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

    register_cache_provider(Watch())


def problem_of(outputs: Any) -> str:
    """ "non-finite" or "black" of what a node put out: latents or pictures; "" where nothing is wrong with them.

    outputs: a list for each slot. A sum shows whether a value is non-finite in a fraction of isfinite's time.
    """
    for slot in outputs or ():
        for item in slot if isinstance(slot, (list, tuple)) else [slot]:
            latents = isinstance(item, Mapping)
            for tensor in floating(item.get("samples") if latents else item):
                if tensor.ndim < 3 or not tensor.numel() or tensor.is_nested:
                    continue
                total = tensor.sum(dtype=torch.float32).item()
                if total - total != 0 and not tensor.isfinite().all():
                    return NON_FINITE
                if total == 0 and not latents and not tensor.any():
                    return BLACK
    return ""


class _Look:
    def __init__(self) -> None:
        self.found: tuple[str, str] | None = None  # of this prompt: a node, and what is wrong with what it put out

    def at(self, node_id: str, class_type: str, outputs: Any) -> None:
        if self.found is None and (wrong := problem_of(outputs)) and computes(host.node_classes().get(class_type)):
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
