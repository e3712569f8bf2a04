"""The second device refuses what a card refuses, and sees what nothing orders."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import second_device
import torch
from comfyui_onediff_guard.pipelines.selftest import checks
from torch.nn import functional as F


def test_tensors_are_on_a_card_of_their_own() -> None:
    x = torch.randn(4, 5)
    there = x.cuda()
    assert there.device == torch.device("cuda:0") and torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.equal(there.cpu(), x)
    there.zero_()
    assert x.any(), "memory of its own"
    _refused(lambda: there + x, "two devices, cuda:0 and cpu")
    _refused(lambda: F.linear(there, torch.randn(3, 5)), "two devices")
    _refused(lambda: F.embedding(torch.tensor([1]), there), "two devices")
    assert (there + torch.tensor(2.0)).sum().item() == 40, "a scalar of the CPU's may be"


def test_memory_runs_out(card: Any) -> None:
    total, used = card.total(), card.used()
    assert torch.cuda.mem_get_info() == (total - used, total) and torch.cuda.memory_allocated() == used
    try:
        card.set_total(used + 1000)
        _refused(lambda: torch.empty(1000, device="cuda"), "CUDA out of memory", torch.OutOfMemoryError)
        _refused(lambda: torch.randn(1000).cuda(), "CUDA out of memory", torch.OutOfMemoryError)
        x = torch.ones(200, device="cuda")
        _refused(partial(torch.add, x, x), "CUDA out of memory", torch.OutOfMemoryError)
        assert card.used() == used + 800
        card.fail_in(2)
        _ = x[:5] + 1
        _refused(partial(torch.add, x[:5], 1), "CUDA out of memory", torch.OutOfMemoryError)
        _ = x[:5] + 1
    finally:
        card.set_total(total)
    del x, _
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == used == card.used()


def test_what_nothing_orders_is_seen() -> None:
    x, side = torch.ones(5, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        _ = x + 1
    _hazard("aten::add reads what")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    y.mul_(2)
    _hazard("aten::mul_ writes what aten::add writes on another stream")


def test_events_and_waits_order() -> None:
    x, side, event = torch.ones(5, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        y = x + 1
        event.record()
    torch.cuda.current_stream().wait_event(event)
    _ = y + 1
    _no_hazard()
    with torch.cuda.stream(side):
        z = y + 1
    side.synchronize()
    _ = z + 1
    _no_hazard()


def test_memory_given_out_again_while_a_stream_uses_it_is_seen(card: Any) -> None:
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
        assert held - card.used() == (0 if recorded else 20), "it stays until the host has waited"
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        z = torch.empty(1, device="cuda")
        right = recorded or waits
        _no_hazard() if right else _hazard("memory given out again while aten::add uses it on another stream")
        torch.cuda.synchronize()
        assert held - card.used() == 20 - z.nbytes
        del y, z


def test_page_locked_memory_changed_during_a_copy_is_seen() -> None:
    x = torch.ones(5).pin_memory()
    assert x.is_pinned() and not torch.ones(5).is_pinned()
    there = x.to("cuda", non_blocking=True)
    x.add_(1)
    _hazard("page-locked memory changed while a copy reads it")
    there = x.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    x.add_(1)
    _no_hazard()
    del there


def test_page_locked_memory_given_back_during_a_copy_is_seen() -> None:
    x = torch.ones(1024)
    assert _cudart().cudaHostRegister(x.data_ptr(), x.nbytes, 0) == 0 and x.is_pinned()
    there = x.to("cuda", non_blocking=True)
    assert _cudart().cudaHostUnregister(x.data_ptr()) == 0
    _hazard("page-locked memory given back while a copy uses it")
    assert _cudart().cudaHostUnregister(x.data_ptr()) != 0
    _refused(lambda: there + 1, "does not correspond to a registered memory region")
    assert torch.equal((there + 1).cpu(), x + 1), "CUDA's error is the next kernel's alone"


def test_a_copy_to_the_host_arrives_when_it_was_waited_for() -> None:
    there, host = torch.ones(5, device="cuda"), torch.zeros(5).pin_memory()
    host.copy_(there, non_blocking=True)
    assert not torch.equal(host, torch.ones(5)), "too early"
    torch.cuda.synchronize()
    assert torch.equal(host, torch.ones(5))


def test_waits_are_counted_with_their_place(card: Any) -> None:
    x, told = torch.ones(5, device="cuda"), list[str]()
    card.reset()
    card.set_on_wait(told.append)
    try:
        x.sum().item()
        x[x > 0]
        x.cpu()
        torch.ones(3).cuda()
        y = x + 1
    finally:
        card.set_on_wait(None)
    del y
    assert told == ["item", "aten::index", "copy to the host", "copy to the device"], told
    counts = card.counts()
    assert counts["waits: item"] == counts["waits: copy to the host"] == 1, counts
    assert counts["bytes to the host"] >= 20 and counts["bytes to the device"] == 12, counts
    assert card.kernels_by_op()["aten::add"] == 1


def test_a_wait_while_a_graph_is_captured_is_refused(card: Any) -> None:
    x = torch.ones(5, device="cuda")
    card.set_capturing(True)
    try:
        _ = x + 1
        _refused(lambda: x.sum().item(), "stream is capturing")
        _refused(x.cpu, "stream is capturing")
    finally:
        card.set_capturing(False)
    assert x.sum().item() == 5


def test_what_cuda_has_no_kernel_for_is_refused() -> None:
    q = torch.randint(-9, 9, (8, 16), dtype=torch.int8, device="cuda")
    _refused(lambda: torch._int_mm(q, q.t()), "greater than 16")
    _refused(lambda: torch.ops.aten.mkldnn_linear(q, q), "CUDA", NotImplementedError)


def test_the_self_test_finds_it_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.TIMED, "card", (64, 64, 64))
    found = checks.selftest(torch.device("cuda:0"))
    verdicts = {line.name: (line.verdict, line.note) for line in found.lines}
    assert found.machine["device"] == "Second device" and "NVIDIA" not in found.machine["driver"]
    assert verdicts.pop("a compiled block")[0] == "not run", "inductor needs a compiler for the card"
    assert {*verdicts.values()} == {("right", "")}, verdicts
    assert len(verdicts) == 21 and any("TF32" in name for name in found.seconds)
    _no_hazard()


def test_the_self_test_notices_what_cards_alone_have(card: Any) -> None:
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
    assert verdict("offload 'group'", "BlockOffload", of_another) == "wrong", "this one's weights stay where they are"


def _refused(call: Callable[[], object], says: str, kind: type[Exception] = RuntimeError) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        call()


def _cudart() -> Any:
    return torch.cuda.cudart()


def _hazard(says: str) -> None:
    found = second_device.hazards()
    second_device.card.reset()
    assert any(says in each for each in found), (says, found)


def _no_hazard() -> None:
    found = second_device.hazards()
    assert not found, found
