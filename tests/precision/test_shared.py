"""Settings shared by all threads of a process, and the gate for exclusive changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial

import process_state
import pytest
import torch._dynamo  # noqa: F401 - its settings are compared
from at_once import HANG_SECONDS, at_once
from comfyui_onediff_guard.precision import upcast
from comfyui_onediff_guard.precision.process_state import NO_WARNINGS, ProcessGate, SharedSetting

HOLD: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "no warnings": NO_WARNINGS.held,
    "eager only": upcast.EAGER_ONLY.held,
    "tf32": partial(upcast.TF32.held, True),
    "no tf32": partial(upcast.TF32.held, False),
    "attention in fp32": upcast.FP32_ATTENTION.held,
}


@pytest.mark.parametrize("name", HOLD)
def test_setting_is_restored_by_the_last_holder(name: str) -> None:
    kinds = ("torch flag", "compiler", "warnings")
    before, first, second = process_state.read(), ExitStack(), ExitStack()
    for stack in (first, second):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(stack.enter_context, HOLD[name]()).result()
    held = process_state.read()
    assert process_state.changes(before, kinds)
    first.close()
    assert not process_state.changes(held, kinds)
    second.close()
    assert not process_state.changes(before, kinds)


def test_setting_is_applied_again_after_a_failed_restore() -> None:
    applied: list[int] = []

    def restore() -> None:
        raise RuntimeError("it cannot be restored")

    setting = SharedSetting(lambda: applied.append(1) or restore)
    for _ in range(2):
        with pytest.raises(RuntimeError), setting.held():
            pass
    assert len(applied) == 2 and not setting.is_held


def test_exclusive_and_shared_holders_wait_for_each_other() -> None:
    gate, log = ProcessGate(), []
    wanted = threading.Event()

    def compute() -> None:
        with gate.shared(), gate.shared():
            inside.wait(HANG_SECONDS)
            while not gate._wanting:
                wanted.wait(0.001)
            log.append("computes")
            gate.yield_()
            log.append("computes again")

    def change() -> None:
        inside.wait(HANG_SECONDS)
        with gate.shared(), gate.exclusive(), gate.exclusive(), gate.shared():
            gate.yield_()  # must let no other thread in
            log.append("alone")

    inside = threading.Barrier(2)
    at_once(compute, change)
    assert log == ["computes", "alone", "computes again"]
    assert (gate._sharing, gate._wanting, gate._taken) == (0, 0, False)


def test_each_yield_lets_at_most_one_exclusive_holder_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if other threads run as soon as it releases the gate."""
    gate, done = ProcessGate(), threading.Event()
    times, leave = [0], gate._leave

    def leave_and_let_others_run() -> None:
        leave()
        for _ in range(20):
            time.sleep(0)

    monkeypatch.setattr(gate, "_leave", leave_and_let_others_run)

    def compute() -> int:
        passed = 0
        with gate.shared():
            for _ in range(200):
                while not gate._wanting:
                    time.sleep(0)
                before = times[0]
                gate.yield_()
                passed = max(passed, times[0] - before)
        done.set()
        return passed

    def change() -> None:
        while not done.is_set():
            with gate.exclusive():
                times[0] += 1

    assert at_once(compute, change, change)[0] == 1


@pytest.mark.parametrize("where", ["shared", "exclusive", "release"])
def test_gate_is_released_after_an_error(where: str) -> None:
    gate = ProcessGate()
    with pytest.raises(KeyboardInterrupt), gate.shared(), getattr(gate, where)():
        raise KeyboardInterrupt
    assert (gate._sharing, gate._wanting, gate._taken) == (0, 0, False)
    with gate.exclusive():
        assert gate._taken
