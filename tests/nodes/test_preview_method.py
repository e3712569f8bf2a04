"""The preview method: by the page's settings, else by the command line."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from comfyui_onediff_guard.comfyui_host import host, previews


@pytest.mark.parametrize(
    ("on_page", "argument", "options", "method"),
    [
        (None, "none", [], ""),  # nothing is set
        (None, "none", ["--preview-method", "none"], "none"),
        (None, "none", ["--preview-method=none"], "none"),
        (None, "taesd", [], "taesd"),
        ("default", "taesd", [], "taesd"),
        ("latent2rgb", "taesd", [], "latent2rgb"),
        ("none", "auto", ["--preview-method", "auto"], "none"),
    ],
)
def test_setting_of_page_overrides_command_line(
    monkeypatch: pytest.MonkeyPatch, on_page: str | None, argument: str, options: list[str], method: str
) -> None:
    settings = {} if on_page is None else {"preview_method": on_page}
    queue = SimpleNamespace(currently_running={0: (1.0, "id", {}, settings, [])})
    monkeypatch.setattr(host, "server", lambda: SimpleNamespace(prompt_queue=queue, last_prompt_id="id"))
    monkeypatch.setattr(host, "arguments", lambda: SimpleNamespace(preview_method=SimpleNamespace(value=argument)))
    monkeypatch.setattr(sys, "argv", ["main.py", *options])
    assert previews._method() == method
