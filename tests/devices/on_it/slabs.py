"""Pinned buffers of group offload: their size and lifetime, and that tensors keep their values."""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights.offload import BlockOffload, Offload, Parts, PinnedBuffer, laid_out
from comfyui_onediff_guard.pipelines.weights.placement import tensors_of
from diffusers import CogVideoXTransformer3DModel
from second_device import runtime
from small_runs import CUDA, frames, opened, opened_fresh
from trained_lora import train_lora

MODELS = ["2b", "1.5", "5b-i2v", "cogview3", "cogview4", "svd", "wan", "wan-ti2v"]


def start_group_offload(model: str = "2b") -> tuple[PipelineHandle, weakref.ref[PinnedBuffer]]:
    """A handle with offload 'group' after one use of the denoiser's weights, and one of their pinned buffers."""
    handle = opened(model, "group")
    handle.store.module(handle.family.denoiser, "fp32", Offload.GROUP)
    with handle.store.onloading(handle.family.denoiser, Offload.GROUP) as weights:
        assert isinstance(weights, BlockOffload) and runtime.registered
        buffer = weakref.ref(weights._pinned_buffers[0])
    assert runtime.registered, "between calls"
    return handle, buffer


def expected() -> torch.Tensor:
    handle = opened_fresh("2b", "none")
    made = frames(handle)
    handle.store.empty()
    return made


class Marked(torch.Tensor):
    """A tensor subclass, like quantised weights."""


def test_pinned_tensors_keep_values_layout_and_class() -> None:
    wide = torch.randn(4, 6)
    tensors = {
        "bias": torch.nn.Parameter(torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16), requires_grad=False),
        "channels last": torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        "transposed": wide.t(),
        "scalar": torch.tensor(3),
        "flags": torch.tensor([True, False, True]),
        "a part of one": torch.randn(4, 4)[:, :2],
        "one for many": torch.randn(1, 3).expand(2, 3),
        "empty": torch.empty(0, 3),
        "of a class of its own": torch.randn(3).as_subclass(Marked),
    }
    before = {name: (t.data.clone(), t.stride(), t.dtype, type(t)) for name, t in tensors.items()}
    buffer = PinnedBuffer([*tensors.values(), tensors["bias"]], torch.cuda.Stream(CUDA))
    buffer.lock()
    for name, tensor in tensors.items():
        data, stride, dtype, kind = before[name]
        assert (tensor.stride(), tensor.dtype, type(tensor)) == (stride, dtype, kind), name
        torch.testing.assert_close(tensor.data, data, rtol=0, atol=0, equal_nan=True)
    left = {"a part of one", "one for many", "empty", "of a class of its own"}
    assert {name for name, tensor in tensors.items() if not tensor.is_pinned()} == left
    assert all(tensor.data_ptr() % 64 == 0 for tensor in buffer.tensors)
    buffer.lock()
    assert len(runtime.registered) == 1
    buffer.unlock()
    buffer.unlock()
    assert not runtime.registered and torch.equal(wide.t(), tensors["transposed"])


def test_unlock_waits_for_pending_copies() -> None:
    stream = torch.cuda.Stream(CUDA)
    buffer = PinnedBuffer([torch.randn(64)], stream)
    buffer.lock()
    with torch.cuda.stream(stream):
        copy = buffer.tensors[0].to(CUDA, non_blocking=True)
    buffer.unlock()
    assert torch.equal(copy.cpu(), buffer.tensors[0])


def test_empty_tensors_are_not_page_locked() -> None:
    buffer = PinnedBuffer([torch.empty(0)], torch.cuda.Stream(CUDA))
    buffer.lock()
    buffer.unlock()
    assert not runtime.most


@pytest.mark.parametrize("model", MODELS)
def test_page_locked_memory_is_at_most_5_percent_above_the_weights(model: str) -> None:
    """Counted in whole pages."""
    handle = opened(model, "none", "bf16")
    denoiser = handle.store.module(handle.family.denoiser, "bf16", place=False)
    with BlockOffload(denoiser, Offload.GROUP, CUDA, blocks=handle.family.blocks):
        assert 1 <= runtime.page_locked / sum(t.nbytes for t in {*tensors_of(denoiser)}) <= 1.05


def test_page_locked_memory_of_published_cogvideox_5b() -> None:
    with torch.device("meta"):
        denoiser = CogVideoXTransformer3DModel(
            num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True
        ).to(torch.bfloat16)
    parts = Parts.of(denoiser, Offload.GROUP, COGVIDEOX.blocks)
    blocks = [{t for module in modules for t in tensors_of(module)} for modules in parts.together]
    locked = sum(-(-laid_out(tensors)[1] // mmap.PAGESIZE) * mmap.PAGESIZE for tensors in (*blocks, parts.rest))
    weights = [t.nbytes for t in {*tensors_of(denoiser)}]
    assert 1 <= locked / sum(weights) <= 1.0001
    each_by_itself = sum(1 << (n_bytes - 1).bit_length() for n_bytes in weights)
    assert round(each_by_itself / sum(weights), 2) == 1.78, "PyTorch's own pinning"


def test_weights_are_page_locked_again_at_the_same_address(card: Any) -> None:
    right = expected()
    handle, seen, at = opened_fresh("2b", "group"), [], []
    for _ in range(2):
        seen.append([])

        def step_done(*_: Any, **__: Any) -> None:
            seen[-1].append((runtime.page_locked, card.counts()["bytes page-locked as they came"]))

        assert torch.equal(frames(handle, step_done=step_done), right)
        assert seen[-1][0][0] and len({*seen[-1]}) == 1, "the same in every step"
        assert not runtime.registered, "after the run"
        offloaded = handle.store.components["transformer"].offloaded
        assert offloaded
        at.append([tensor.data_ptr() for tensor in tensors_of(offloaded.made_for[0])])
    assert at[0] == at[1]


AFTER_USE: dict[str, Callable[[PipelineHandle, str], object]] = {
    "rest": lambda handle, name: handle.store.offload_to_cpu(name),
    "rest or drop": lambda handle, name: handle.store.offload_or_unload(name),
    "drop": lambda handle, name: handle.store.drop(name),
    "empty": lambda handle, _name: handle.store.empty(),
    "whole": lambda handle, name: handle.store.module(name, "fp32"),
    "sequential": lambda handle, name: handle.store.onloading(name, Offload.SEQUENTIAL),
    "another dtype": lambda handle, name: handle.store.module(name, "bf16", Offload.GROUP),
}


@pytest.mark.parametrize("how", AFTER_USE)
def test_no_memory_stays_page_locked(how: str) -> None:
    handle, buffer = start_group_offload()
    AFTER_USE[how](handle, "transformer")
    assert not runtime.registered
    if how != "rest":
        gc.collect()
        assert buffer() is None


def test_changed_memory_layout_frees_pinned_buffers() -> None:
    handle, buffer = start_group_offload("svd")
    handle.store.lay_out("unet", channels_last=False)
    assert runtime.registered and buffer() is not None, "the layout is already this"
    handle.store.lay_out("unet", channels_last=True)
    gc.collect()
    assert not runtime.registered and buffer() is None


def test_lora_results_match_and_page_locks_are_released(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    lora = train_lora(tmp_path, model_folder("2b"))
    right = frames(add_lora(opened_fresh("2b", "none"), lora))
    handle = opened_fresh("2b", "group")
    without = frames(handle)
    assert torch.equal(frames(add_lora(handle, lora)), right) and not runtime.registered
    assert torch.equal(frames(handle), without)


def test_failed_pinned_allocation_keeps_weights_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = expected()
    runtime.most = 0
    sizes: list[int] = []

    def scarce(fileno: int, n_bytes: int, pages: Any = mmap.mmap, **how: Any) -> mmap.mmap:
        sizes.append(n_bytes)
        if len(sizes) == 2:
            raise OSError(12, "Cannot allocate memory")
        return pages(fileno, n_bytes, **how)

    monkeypatch.setattr(mmap, "mmap", scarce)
    assert torch.equal(frames(opened_fresh("2b", "group")), right)
    assert len(sizes) == 2 and not runtime.most
    assert any("([Errno 12] Cannot allocate memory): one block at a time" in line for line in caplog.messages)


def test_drop_from_another_thread_keeps_weights_in_use_locked() -> None:
    handle, _ = start_group_offload()
    with handle.store.onloading("transformer", Offload.GROUP):
        dropping = threading.Thread(target=lambda: handle.store.drop("transformer"))
        dropping.start()
        dropping.join()
        assert runtime.registered
