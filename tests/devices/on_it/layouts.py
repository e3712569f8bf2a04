"""Group offload of convolutions in channels-last layout."""

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
    monkeypatch.setitem(small_runs.SIZES, "svd", (128, 128, 2))  # at 64 × 64 some norms have one value: rounding errors


def test_group_offload_is_bit_equal_in_both_memory_layouts(room: Room) -> None:
    whole = room.opened("svd")
    made = {how: sampled(replace(whole, compile_options=how), "svd", steps=1)[0] for how in (CompileOptions(), LAST)}
    whole.store.empty()
    handle = room.opened("svd", "group")
    for how in (LAST, CompileOptions(), LAST):
        assert torch.equal(sampled(replace(handle, compile_options=how), "svd", steps=1)[0], made[how])
    assert {key[-1] for key in handle.store.room if key[0] == "unet"} == {True, False}, "one estimate each"
