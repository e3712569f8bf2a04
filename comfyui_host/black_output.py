"""Tell the page of a run whose pictures came out non-finite or black, so that it can offer to run it again, guarded.

ComfyUI 0.33 and newer show each node's outputs to cache providers. Ours looks at them, and caches nothing.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Sequence
from typing import Any

from . import host
from .guarded_prompt import computes, outputs_of, with_guards

NON_FINITE, BLACK = "non-finite", "black"
MOST_NODES, MOST_CHARACTERS = 100, 100_000  # of a prompt that is looked at
logger = logging.getLogger(__name__)


def watch(data: dict[str, Any]) -> None:
    """Look at the outputs of a prompt that was queued from a page, where this ComfyUI shows them.

    ComfyUI hashes what each node's outputs hang on, for as long as it has a cache provider: so ours comes off with the
    last prompt that is looked at, and prompts with large values are left alone.
    """
    providers: Any = sys.modules.get("comfy_execution.cache_provider")
    base: Any = getattr(providers, "CacheProvider", None)
    if base is None or not _is_looked_at(data.get("prompt"), data.get("client_id")):
        return
    with _lock:
        if not _watching:
            _watching.append(_watch_of(base))
            providers.register_cache_provider(_watching[0])
        _watching[0].awaited += 1


_lock = threading.Lock()
_watching: list[Any] = []  # our cache provider, while it is registered


def _is_looked_at(prompt: Any, client_id: Any) -> bool:
    """Whether a prompt comes from a page, is small, and has no guard where it could have one."""
    if not client_id or not isinstance(prompt, dict):
        return False
    inputs = [node.get("inputs") for node in prompt.values() if isinstance(node, dict)]
    texts = [value for each in inputs if isinstance(each, dict) for value in each.values() if isinstance(value, str)]
    is_small = len(prompt) <= MOST_NODES and sum(map(len, texts)) <= MOST_CHARACTERS
    return is_small and with_guards(prompt, host.node_classes())[1] > 0


def _watch_of(base: Any) -> Any:
    look = _Look()

    class Watch(base):
        """Every method of it may be called from the thread that executes prompts, and raise nothing."""

        awaited = 0  # prompts that are to be looked at

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
            was_awaited = look.tell(prompt_id)
            with _lock:
                self.awaited -= was_awaited
                if self.awaited <= 0:
                    _watching.clear()
                    sys.modules["comfy_execution.cache_provider"].unregister_cache_provider(self)

    return Watch()


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
            held = item.get("samples") if isinstance(item, dict) else item
            for tensor in getattr(held, "tensors", [held]):  # ComfyUI's nested ones have several
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

    def tell(self, prompt_id: str) -> bool:
        """Tell of what was found in a prompt that ends, where a guard may have prevented it. Returns whether the prompt
        is one that is looked at."""
        server, found = host.server(), self.found
        self.found = None
        running = {item[1]: item[2:4] for item in server.prompt_queue.currently_running.values()}
        prompt, extra = running.get(prompt_id) or ({}, {})
        if not _is_looked_at(prompt, extra.get("client_id")):
            return False
        if found and server.client_id is not None:
            node_id, wrong = found
            logger.warning("Node %s put out a result that is %s.", node_id, wrong)
            guarded, _ = with_guards(prompt, host.node_classes())
            if any(guarded[each] is not prompt[each] for each in _before(prompt, node_id)):
                told = {"prompt": prompt_id, "node": node_id, "problem": wrong}
                server.send_sync("onediff_guard.black", told, server.client_id)
        return True


def _before(prompt: dict[str, Any], node_id: str) -> set[str]:
    """A node, and those that it hangs on."""
    found, left = set[str](), [node_id]
    while left:
        each = left.pop()
        if each in prompt and each not in found:
            found.add(each)
            inputs = prompt[each].get("inputs") if isinstance(prompt[each], dict) else None
            links = [value for value in (inputs or {}).values() if isinstance(value, list) and len(value) == 2]
            left += [source for source, _ in links if isinstance(source, str)]
    return found
