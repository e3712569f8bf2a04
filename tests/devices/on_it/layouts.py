"""Convolutions with their channels last, of which the weights come to the device in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import small_runs
import torch
from card_room import Room
from comfyui_onediff_guard.pipelines.compile.backends import CompileOptions
from small_runs import sampled

LAST = CompileOptions(channels_last=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(small_runs.SIZES, "svd", (128, 128, 2))  # at 64 × 64 norms of one value are of rounding errors


def test_weights_that_come_in_parts(room: Room) -> None:
    whole = room.opened("svd")
    made = {how: sampled(replace(whole, compile_options=how), "svd", steps=1)[0] for how in (CompileOptions(), LAST)}
    whole.store.empty()
    handle = room.opened("svd", "group")
    for how in (LAST, CompileOptions(), LAST):
        assert torch.equal(sampled(replace(handle, compile_options=how), "svd", steps=1)[0], made[how])
    assert {key[-1] for key in handle.store.room if key[0] == "unet"} == {True, False}, "each is counted for itself"
