"""The Self-Test node, and its result in the loader and doctor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard import NODE_CLASS_MAPPINGS
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.commands.doctor import examine
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice
from comfyui_onediff_guard.pipelines.selftest import checks as module
from comfyui_onediff_guard.precision.arch import detect
from comfyui_onediff_guard.precision.self_test import CheckResult, verified_architecture
from comfyui_onediff_guard.trust import foreign
from self_tests import DAY, keep_self_test

CPU = torch.device("cpu")


def test_loader_and_doctor_show_result_of_self_test(
    monkeypatch: pytest.MonkeyPatch, model_folder: Callable[..., Path], without_comfyui: None, tmp_path: Path
) -> None:
    monkeypatch.setenv(host.SELFTEST_VARIABLE, str(tmp_path))
    folder = model_folder("2b")
    loader = NODE_CLASS_MAPPINGS["OneDiffGuardLoadPipeline"]()
    changed, texts = [], []
    for line, message in (
        (None, "not verified: run `onediff-guard selftest`"),
        (CheckResult("a product", "right"), f"verified on this card on {DAY}"),
        (CheckResult("a product in fp32", "wrong", concern="fp32"), f"on {DAY}, but fp32 FAILED"),
    ):
        if line:
            keep_self_test(tmp_path, line)
        changed.append(loader.IS_CHANGED(model=folder.name))
        (shown,) = loader.load(folder.name, "fp32", "eager", "none")["ui"]["onediff_guard"]
        texts = [" ".join(text.split()) for text in (shown["text"], examine(folder, precision="fp32").text())]
        assert all(message in text for text in texts), texts
    assert len({*changed}) == 3, "a new result makes the loader run again"
    assert all("fp32, as you chose, but fp32 failed this card's self-test" in text for text in texts)


def test_node_runs_saves_and_shows_self_test(monkeypatch: pytest.MonkeyPatch, comfyui: Any, tmp_path: Path) -> None:
    monkeypatch.setenv(host.SELFTEST_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(module, "_times", lambda *_: [("a product", 0.001)])
    monkeypatch.setattr(module, "choose_backend", lambda *_: BackendChoice("eager", "not tried here"))
    answer = NODE_CLASS_MAPPINGS["OneDiffGuardSelfTest"]().check(node_id="7")
    (text,) = answer["result"]
    (file,) = (tmp_path / "kept").iterdir()
    assert text.startswith(f"Result: OK. All 19 checks that ran are right.\nKept in {file}.\n\nSelf-test of "), (
        "result and file come first"
    )
    assert answer["ui"]["text"] == [text] and comfyui.texts[-1] == ("7", text)
    assert answer["ui"]["onediff_guard"][0]["architecture"]["name"] == detect(CPU).name
    assert verified_architecture(CPU, tmp_path / "kept").tested == foreign.read(file)["date"]
    monkeypatch.setenv(host.SELFTEST_VARIABLE, str(file))  # which is not a folder
    assert "It could not be kept in" in NODE_CLASS_MAPPINGS["OneDiffGuardSelfTest"]().check()["result"][0]
