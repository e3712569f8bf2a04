"""Report a run with non-finite or black images to the page, so that the page can offer a guarded rerun.

ComfyUI 0.33 and newer pass each node's outputs to cache providers. Ours checks the outputs, and caches nothing.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from . import host
from .guarded_prompt import computes, outputs_of, with_guards

NON_FINITE, BLACK = "non-finite", "black"
MOST_NODES, MOST_CHARACTERS = 100, 100_000  # limits for a prompt that is checked
SECONDS_TO_QUEUE = 60.0  # at most, between the request and its entry in the queue
logger = logging.getLogger(__name__)


def watch(data: dict[str, Any]) -> dict[str, Any]:
    """Check the outputs of a prompt that was queued from a page, if this ComfyUI has cache providers. Returns the
    request, with a new `prompt_id` if it had none.

    While a cache provider is registered, ComfyUI hashes all inputs that each node depends on. So ours is unregistered
    after the last checked prompt, and prompts with large values are not checked.
    """
    providers: Any = sys.modules.get("comfy_execution.cache_provider")
    if providers is None or not _is_looked_at(data.get("prompt"), data.get("client_id")):
        return data
    prompt_id = str(data.get("prompt_id") or uuid.uuid4())
    with _lock:
        _awaited[prompt_id] = time.monotonic()
        if not _watching:
            _watching.append(type("Watch", (_Watch, providers.CacheProvider), {})())
            providers.register_cache_provider(_watching[0])
    return {**data, "prompt_id": prompt_id}


_lock = threading.Lock()
_watching: list[Any] = []  # our cache provider, while it is registered
_awaited: dict[str, float] = {}  # prompt id → `time.monotonic()` of its request, for prompts to check


def _come_off(ended: str = "") -> None:
    """Unregister the provider if no prompt is left to check. Forgets `ended`, and refused or removed prompts: those
    that are not in the queue SECONDS_TO_QUEUE after their request."""
    running, pending = host.server().prompt_queue.get_current_queue_volatile()
    queued = {item[1] for item in (*running, *pending)} - {ended}
    with _lock:
        for prompt_id, since in [*_awaited.items()]:
            if prompt_id == ended or (prompt_id not in queued and time.monotonic() - since > SECONDS_TO_QUEUE):
                del _awaited[prompt_id]
        if not _awaited and _watching:
            sys.modules["comfy_execution.cache_provider"].unregister_cache_provider(_watching.pop())


def _is_looked_at(prompt: Any, client_id: Any) -> bool:
    """Return whether a prompt comes from a page, is small, and could get at least one guard."""
    if not client_id or not isinstance(prompt, dict):
        return False
    inputs = [node.get("inputs") for node in prompt.values() if isinstance(node, dict)]
    texts = [value for each in inputs if isinstance(each, dict) for value in each.values() if isinstance(value, str)]
    is_small = len(prompt) <= MOST_NODES and sum(map(len, texts)) <= MOST_CHARACTERS
    return is_small and with_guards(prompt, host.node_classes())[1] > 0


class _Watch:
    """A cache provider, before ComfyUI's class of them: each of its methods may be called from the thread that executes
    prompts, and raise nothing."""

    prompt_id = ""  # the id of the running prompt, if it is checked
    found: tuple[str, str] | None = None  # the id of the first node with a bad output, and its problem

    def should_cache(self, context: Any, value: Any = None) -> bool:
        if value is not None and self.prompt_id and self.found is None:
            node = host.node_classes().get(context.class_type)
            if (wrong := problem_of(value.outputs, outputs_of(node))) and computes(node):
                self.found = context.node_id, wrong
        return False

    async def on_lookup(self, context: Any) -> None:
        return None

    async def on_store(self, context: Any, value: Any) -> None:
        return None

    def on_prompt_start(self, prompt_id: str) -> None:
        self.found, self.prompt_id = None, prompt_id if prompt_id in _awaited else ""
        _come_off()

    def on_prompt_end(self, prompt_id: str) -> None:
        try:
            self._tell()
        finally:
            _come_off(prompt_id)

    def _tell(self) -> None:
        """Report a finding to the page when the prompt ends, if a guard could have prevented it."""
        server, found = host.server(), self.found
        if not found or server.client_id is None:
            return
        node_id, wrong = found
        logger.warning("The output of node %s is %s.", node_id, wrong)
        running, _ = server.prompt_queue.get_current_queue_volatile()
        (prompt,) = (item[2] for item in running if item[1] == self.prompt_id)
        guarded, _ = with_guards(prompt, host.node_classes())
        if any(guarded[each] is not prompt[each] for each in _before(prompt, node_id)):
            told = {"prompt": self.prompt_id, "node": node_id, "problem": wrong}
            server.send_sync("onediff_guard.black", told, server.client_id)


def problem_of(outputs: Any, types: Sequence[str]) -> str:
    """Return "non-finite" or "black" if a node's output is so; "" if nothing is wrong.

    outputs: a list of values for each slot. types: the slots' types; only IMAGE and LATENT are checked. The sum is
    checked first: it finds a non-finite value in a fraction of isfinite's time.
    """
    import torch

    for slot, kind in zip(outputs or (), types, strict=False):
        if kind not in ("IMAGE", "LATENT"):
            continue
        for item in slot if isinstance(slot, list) else [slot]:
            held = item.get("samples") if isinstance(item, dict) else item
            for tensor in getattr(held, "tensors", [held]):  # ComfyUI's NestedTensor has several
                if not isinstance(tensor, torch.Tensor) or tensor.is_nested or not tensor.is_floating_point():
                    continue
                total = tensor.sum(dtype=torch.float32).item() if tensor.numel() else 1.0
                if not math.isfinite(total) and not tensor.isfinite().all():
                    return NON_FINITE
                if total == 0 and kind == "IMAGE" and not tensor.any():
                    return BLACK
    return ""


def _before(prompt: dict[str, Any], node_id: str) -> set[str]:
    """Return the ids of a node and of all nodes that it depends on."""
    found, left = set[str](), [node_id]
    while left:
        each = left.pop()
        if each in prompt and each not in found:
            found.add(each)
            inputs = prompt[each].get("inputs") if isinstance(prompt[each], dict) else None
            links = [value for value in (inputs or {}).values() if isinstance(value, list) and len(value) == 2]
            left += [source for source, _ in links if isinstance(source, str)]
    return found
