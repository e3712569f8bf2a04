"""The second device itself: it reports unordered accesses, and the self-test runs on it."""

from __future__ import annotations

import contextlib
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import second_device
import torch
from comfyui_onediff_guard.pipelines.selftest import checks


def test_unordered_accesses_are_reported() -> None:
    x, side = torch.ones(5, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        _ = x + 1
    _hazard("aten::add reads what")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    y.mul_(2)
    _hazard("aten::mul_ writes what aten::add writes on another stream")
    page_locked = torch.ones(5).pin_memory()
    on_device = page_locked.to("cuda", non_blocking=True)
    page_locked.add_(1)
    _hazard("page-locked memory changed while a copy reads it")
    torch.cuda.synchronize()
    page_locked.add_(1)
    _no_hazard()
    del on_device


def test_reuse_of_memory_that_a_stream_still_uses_is_reported(card: Any) -> None:
    side = torch.cuda.Stream()
    for recorded, waits in ((False, False), (False, True), (True, False)):
        x = torch.ones(5, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1
        if recorded:
            x.record_stream(side)
        held = card.used()
        del x
        assert held - card.used() == (0 if recorded else 20), "recorded memory is kept until the host waits"
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        z = torch.empty(1, device="cuda")
        right = recorded or waits
        _no_hazard() if right else _hazard("memory given out again while aten::add uses it on another stream")
        torch.cuda.synchronize()
        assert held - card.used() == 20 - z.nbytes
        del y, z


def test_self_test_passes_on_the_second_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.TIMED, "card", (64, 64, 64))
    found = checks.selftest(torch.device("cuda:0"))
    verdicts = {line.name: (line.verdict, line.note) for line in found.lines}
    assert found.machine["device"] == "Second device" and "NVIDIA" not in found.machine["driver"]
    assert verdicts.pop("a compiled block")[0] == "not run", "inductor needs a compiler for the card"
    assert {*verdicts.values()} == {("right", "")}, verdicts
    assert len(verdicts) == 21 and any("TF32" in name for name in found.seconds)
    _no_hazard()


def test_self_test_detects_broken_memory_estimate_and_offload(card: Any) -> None:
    every, own = checks._checks, checks.BlockOffload

    def verdict(name: str, part: str, broken: Any) -> str:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(checks, "_times", lambda *_: ())
            patched.setattr(checks, "_checks", lambda card: [each for each in every(card) if each.name == name])
            patched.setattr(f"{checks.__name__}.{part}", broken)
            return checks.selftest(torch.device("cuda:0")).lines[0].verdict

    def little(_: Any) -> Any:
        return contextlib.nullcontext(SimpleNamespace(most=2**20))

    assert verdict("peak memory beyond the estimate", "counting", little) == "wrong"
    of_another = lambda network, *args, **kwargs: own(copy.deepcopy(network), *args, **kwargs)  # noqa: E731
    assert verdict("offload 'group'", "BlockOffload", of_another) == "wrong", "the original's weights are not moved"


def _hazard(message: str) -> None:
    found = second_device.hazards()
    second_device.card.reset()
    assert any(message in each for each in found), (message, found)


def _no_hazard() -> None:
    found = second_device.hazards()
    assert not found, found
