"""Detection of black outputs: which prompts are checked, and how long the cache provider is registered."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from comfyui_onediff_guard.comfyui_host import black_output, every_workflow
from test_every_workflow import CLASSES, LOADED, node

BLACK = [[torch.zeros(1, 8, 8, 3)]]
PROMPT = {**LOADED, "2": node("Sampler", model=["1", 0]), "3": node("Decode", vae=["1", 2], samples=["2", 0])}
GUARDED = {**LOADED, "2": node("Save", model=["1", 0])}


class Comfy:
    """Stand-in for ComfyUI that queues prompts, runs them and calls cache providers."""

    class CacheProvider:
        pass

    def __init__(self) -> None:
        self.providers: list[Any] = []
        self.register_cache_provider, self.unregister_cache_provider = self.providers.append, self.providers.remove
        self.events: list[Any] = []
        self.client_id = "page"
        self.prompt_queue = self
        self.running: list[Any] = []
        self.pending: list[Any] = []
        self.ids = map(str, itertools.count())

    def get_current_queue_volatile(self) -> tuple[list[Any], list[Any]]:
        return [*self.running], [*self.pending]

    def send_sync(self, event: str, data: dict[str, Any], client: str) -> None:
        self.events.append((event, data["prompt"], data["node"], data["problem"], client))

    def post(self, prompt: dict[str, Any] = PROMPT, *, refused: bool = False, **more: Any) -> str:
        data = every_workflow.on_prompt({"prompt": prompt, "client_id": "page", **more})
        prompt_id = data.get("prompt_id") or next(self.ids)
        if not refused:
            self.pending.append((0, prompt_id, data["prompt"], {"client_id": "page"}, []))
        return prompt_id

    def run(self, *, outputs: Any = BLACK, error: bool = False) -> None:
        """Run the next prompt of the queue. error: its last node fails."""
        self.running = [self.pending.pop(0)]
        _, prompt_id, prompt, *_ = self.running[0]
        self.notify("on_prompt_start", prompt_id)
        for id_, each in [*prompt.items()][: -1 if error else None]:
            context = SimpleNamespace(node_id=id_, class_type=each["class_type"])
            self.notify("should_cache", context)
            self.notify("should_cache", context, SimpleNamespace(outputs=outputs))
        self.notify("on_prompt_end", prompt_id)
        self.running = []

    def notify(self, name: str, *arguments: Any) -> None:
        for provider in tuple(self.providers):
            with suppress(RuntimeError):
                getattr(provider, name)(*arguments)


@pytest.fixture
def comfy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Comfy]:
    made = Comfy()
    monkeypatch.setitem(sys.modules, "comfy_execution.cache_provider", made)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(black_output.host, "server", lambda: made)
    monkeypatch.setattr(black_output.host, "node_classes", lambda: CLASSES)
    monkeypatch.setattr(every_workflow, "settings_of", lambda _user: {})
    monkeypatch.delenv(every_workflow.VARIABLE, raising=False)
    yield made
    black_output._awaited.clear()
    black_output._watching.clear()


def test_page_is_notified_of_node_with_black_output(comfy: Comfy) -> None:
    mine, theirs = comfy.post(), comfy.post(prompt_id="its own")
    assert theirs == "its own" != mine
    for _ in range(2):
        comfy.run()
    assert comfy.events == [("onediff_guard.black", each, "3", "black", "page") for each in (mine, theirs)]


@pytest.mark.parametrize(
    "more",
    [{"client_id": None}, {"prompt": GUARDED}, {"extra_data": {"onediff_guard": True}}, {"prompt": {}}],
    ids=["by API", "no guard could help", "guarded", "empty"],
)
def test_prompts_that_need_no_check_register_no_provider(comfy: Comfy, more: dict[str, Any]) -> None:
    comfy.post(**more)
    assert not comfy.providers and not black_output._awaited
    comfy.run()
    assert not comfy.events


def test_unchecked_prompt_between_checked_ones_sends_no_event(comfy: Comfy) -> None:
    first, _, last = comfy.post(), comfy.post(client_id=None), comfy.post()
    for _ in range(3):
        comfy.run()
    assert [event[1] for event in comfy.events] == [first, last] and not comfy.providers


@pytest.mark.parametrize("how", ["healthy", "black", "error", "sending fails", "a node without a class"])
def test_provider_is_unregistered_after_last_prompt(comfy: Comfy, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "sending fails":
        monkeypatch.setattr(comfy, "send_sync", Mock(side_effect=RuntimeError))
    if how == "a node without a class":
        monkeypatch.setattr(black_output.host, "node_classes", lambda: CLASSES if not comfy.running else {})
    for _ in range(2):
        comfy.post()
    comfy.run(outputs=[[torch.ones(1, 8, 8, 3)]] if how == "healthy" else BLACK, error=how == "error")
    assert len(comfy.providers) == 1, "one for all prompts"
    comfy.run(outputs=[[torch.ones(1, 8, 8, 3)]] if how == "healthy" else BLACK, error=how == "error")
    assert not comfy.providers and not black_output._awaited


@pytest.mark.parametrize("gone", ["refused", "taken from the queue"])
def test_prompt_that_never_runs_is_not_awaited(comfy: Comfy, gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI validates a prompt after the handler saw it, so it is given time to enter the queue."""
    comfy.post(refused=True)
    if gone == "taken from the queue":
        comfy.post()
        comfy.pending.clear()
    monkeypatch.setattr(black_output.time, "monotonic", lambda: 1e12)
    comfy.post(client_id=None)
    comfy.run()
    assert not comfy.providers and not black_output._awaited and not comfy.events


def test_prompt_that_is_being_validated_is_awaited(comfy: Comfy) -> None:
    late = comfy.post(refused=True)
    comfy.post(client_id=None)
    comfy.run()
    comfy.pending.append((0, late, PROMPT, {"client_id": "page"}, []))
    comfy.run()
    assert [event[1] for event in comfy.events] == [late] and not comfy.providers
