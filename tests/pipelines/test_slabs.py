"""Page-locked memory of weights that come block by block: how much, for how long, and that they stay what they are."""

from __future__ import annotations

import gc
import logging
import mmap
import weakref
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.families.cogvideox import COGVIDEOX
from comfyui_onediff_guard.pipelines.run import handle as handles
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, add_lora
from comfyui_onediff_guard.pipelines.weights import components as stores
from comfyui_onediff_guard.pipelines.weights import offload as offloading
from comfyui_onediff_guard.pipelines.weights.offload import Offload, in_parts
from comfyui_onediff_guard.pipelines.weights.parts import Parts, tensors_of
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.pipelines.weights.slab import Slab, laid_out
from diffusers import CogVideoXTransformer3DModel
from moving import frames, opened
from page_locked import CUDA, Cuda, stand_in_for_cuda
from test_offload import assert_same, run
from trained_lora import train_lora

MODELS = ["2b", "1.5", "5b-i2v", "cogview3", "cogview4", "svd", "wan", "wan-ti2v"]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Generator[Cuda]:
    gc.collect()
    for module in (handles, offloading, stores):
        monkeypatch.setattr(module, "brings_parts_to", lambda _device: True)
    with stand_in_for_cuda() as cuda:
        yield cuda
        gc.collect()
        assert not cuda.registered, "nothing stays page-locked when nobody has the weights any more"
        assert not cuda.copied_while_unregistered


def made(folder: Path, offload: str) -> PipelineHandle:
    return opened(folder, offload, PlainPlacement(torch.device("cpu")))


def aligned(handle: PipelineHandle) -> PipelineHandle:
    """As on a device, where each weight is a tensor by itself. As read from a file they begin anywhere, and a CPU's
    matrix products round by where a row begins."""
    for name in filter(handle.family.components.__contains__, ("text_encoder", handle.family.denoiser)):
        for tensor in tensors_of(handle.store.module(name, "fp32", place=False)):
            tensor.data = tensor.data.clone()
    return handle


class Marked(torch.Tensor):
    """As quantised weights are: of a class of their own."""


def test_tensors_stay_what_they_are(cuda: Cuda) -> None:
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
    slab = Slab([*tensors.values(), tensors["bias"]], torch.cuda.Stream(CUDA))
    slab.lock()
    for name, tensor in tensors.items():
        data, stride, dtype, kind = before[name]
        assert (tensor.stride(), tensor.dtype, type(tensor)) == (stride, dtype, kind), name
        assert (
            torch.equal(tensor.data.view(-1).view(torch.uint8), data.view(-1).view(torch.uint8))
            if (tensor.is_contiguous() and tensor.numel())
            else torch.equal(tensor, data)
        ), name
    left = {"a part of one", "one for many", "empty", "of a class of its own"}
    assert {name for name, tensor in tensors.items() if not tensor.is_pinned()} == left
    assert all(tensor.data_ptr() % 64 == 0 for tensor in slab.tensors)
    slab.lock()
    assert len(cuda.registered) == 1
    slab.unlock()
    slab.unlock()
    assert not cuda.registered and torch.equal(wide.t(), tensors["transposed"])


def test_of_nothing_nothing_is_page_locked(cuda: Cuda) -> None:
    slab = Slab([torch.empty(0)], torch.cuda.Stream(CUDA))
    slab.lock()
    slab.unlock()
    assert not cuda.most_registered


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_page_locked_is_no_more_than_the_weights(
    cuda: Cuda, model_folder: Callable[..., Path], model: str, dtype: str
) -> None:
    """Pages counted whole."""
    handle = made(model_folder(model), "none")
    denoiser = handle.store.module(handle.family.denoiser, dtype, place=False)
    weights = in_parts(denoiser, Offload.GROUP, CUDA, blocks=handle.family.blocks)
    with weights:
        assert 1 <= cuda.page_locked / sum(t.nbytes for t in {*tensors_of(denoiser)}) <= 1.05


def test_page_locked_of_cogvideox_5b_as_published() -> None:
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
    assert round(each_by_itself / sum(weights), 2) == 1.78, "as PyTorch would"


@pytest.mark.parametrize("model", MODELS)
def test_every_family_is_bit_equal(cuda: Cuda, model_folder: Callable[..., Path], model: str) -> None:
    expected = run(aligned(made(model_folder(model), "none")), model)
    handle = made(model_folder(model), "group")
    seen: list[tuple[int, int]] = []
    found = run(handle, model, step_done=lambda *_: seen.append((cuda.page_locked, cuda.staged)))
    assert_same(found, expected)
    (locked, staged), *others = seen
    assert locked and others == [(locked, staged)] * len(others), "each is copied from where it is, step for step"
    assert not cuda.registered, "at rest"


AFTERWARDS: dict[str, Callable[[PipelineHandle, str], object]] = {
    "rest": lambda handle, name: handle.store.rest(name),
    "rest or drop": lambda handle, name: handle.store.rest_or_drop(name),
    "drop": lambda handle, name: handle.store.drop(name),
    "empty": lambda handle, _name: handle.store.empty(),
    "whole": lambda handle, name: handle.store.module(name, "fp32"),
    "sequential": lambda handle, name: handle.store.onloading(name, Offload.SEQUENTIAL),
    "another dtype": lambda handle, name: handle.store.module(name, "bf16", Offload.GROUP),
}


@pytest.mark.parametrize("how", AFTERWARDS)
def test_nothing_stays_page_locked(cuda: Cuda, model_folder: Callable[..., Path], how: str) -> None:
    handle = made(model_folder("2b"), "group")
    name = handle.family.denoiser
    handle.store.module(name, "fp32", Offload.GROUP)
    with handle.store.onloading(name, Offload.GROUP) as weights:
        assert isinstance(weights, offloading.InParts) and cuda.registered
        slab = weakref.ref(weights._slabs[0])
    del weights
    assert cuda.registered, "between calls"
    AFTERWARDS[how](handle, name)
    assert not cuda.registered
    if how != "rest":
        gc.collect()
        assert slab() is None


def test_weights_that_are_laid_out_otherwise_leave_their_slabs(cuda: Cuda, model_folder: Callable[..., Path]) -> None:
    handle = made(model_folder("svd"), "group")
    handle.store.module("unet", "fp32", Offload.GROUP)
    with handle.store.onloading("unet", Offload.GROUP) as weights:
        assert isinstance(weights, offloading.InParts) and cuda.registered
        slab = weakref.ref(weights._slabs[0])
    del weights
    handle.store.lay_out("unet", channels_last=False)
    assert cuda.registered and slab() is not None, "they lie so already"
    handle.store.lay_out("unet", channels_last=True)
    gc.collect()
    assert not cuda.registered and slab() is None


def test_weights_that_rested_are_page_locked_again_where_they_are(
    cuda: Cuda, model_folder: Callable[..., Path]
) -> None:
    handle = made(model_folder("2b"), "group")
    first = frames(handle)
    weights = handle.store._onloading["transformer"][1]
    at = [tensor.data_ptr() for tensor in tensors_of(weights.component)]
    assert not cuda.registered
    assert torch.equal(frames(handle), first)
    assert handle.store._onloading["transformer"][1] is weights
    assert [tensor.data_ptr() for tensor in tensors_of(weights.component)] == at


def test_a_lora_has_its_layers_page_locked(cuda: Cuda, model_folder: Callable[..., Path], tmp_path: Path) -> None:
    lora = train_lora(tmp_path, model_folder("2b"))
    expected = frames(add_lora(aligned(made(model_folder("2b"), "none")), lora))
    handle = made(model_folder("2b"), "group")
    without = frames(handle)
    assert torch.equal(frames(add_lora(handle, lora)), expected) and not cuda.registered
    assert torch.equal(frames(handle), without)


@pytest.mark.parametrize("pages", [0, 200])
def test_where_the_system_does_not_let_it_weights_are_page_locked_as_they_come(
    cuda: Cuda, model_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture, pages: int
) -> None:
    expected = frames(aligned(made(model_folder("2b"), "none")))
    cuda.limit = pages * mmap.PAGESIZE
    with caplog.at_level(logging.WARNING):
        found = frames(handle := made(model_folder("2b"), "group"))
    assert torch.equal(found, expected)
    (said,) = [line for line in caplog.messages if "page-locked" in line]
    assert said.startswith("main memory cannot be page-locked for all blocks (CUDA error: out of memory): slower")
    assert bool(cuda.most_registered) == bool(pages), "in the middle"
    assert not cuda.registered and not cuda.error, "the next kernel would raise it"
    weights = sum(t.nbytes for t in tensors_of(handle.store._modules["transformer"][1]))
    assert cuda.staged > weights


def test_without_main_memory_for_a_slab_the_weights_stay_where_they_are(
    cuda: Cuda, model_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = frames(aligned(made(model_folder("2b"), "none")))
    sizes: list[int] = []

    def scarce(fileno: int, n_bytes: int, pages: Any = mmap.mmap, **how: Any) -> mmap.mmap:
        sizes.append(n_bytes)
        if len(sizes) == 2:
            raise OSError(12, "Cannot allocate memory")
        return pages(fileno, n_bytes, **how)

    monkeypatch.setattr(mmap, "mmap", scarce)
    assert torch.equal(frames(made(model_folder("2b"), "group")), expected)
    assert len(sizes) == 2 and not cuda.most_registered
    assert any("([Errno 12] Cannot allocate memory): slower" in line for line in caplog.messages)


def test_an_error_in_a_block_leaves_copies_alone(cuda: Cuda, model_folder: Callable[..., Path]) -> None:
    handle = replace(made(model_folder("2b"), "none"), offload=Offload.GROUP)
    layer = handle.store.module("transformer", "fp32", place=False).transformer_blocks[0].ff.net[2]

    def fail(*_: Any) -> None:
        assert cuda.registered
        raise KeyError("as an interrupt")

    failing = layer.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="as an interrupt"):
        frames(handle)
    failing.remove()
    handle.store.drop("transformer")
    assert not cuda.registered


def test_another_thread_that_computes_keeps_its_memory(cuda: Cuda, model_folder: Callable[..., Path]) -> None:
    import threading

    handle = made(model_folder("2b"), "group")
    handle.store.module("transformer", "fp32", Offload.GROUP)
    with handle.store.onloading("transformer", Offload.GROUP):
        dropping = threading.Thread(target=lambda: handle.store.drop("transformer"))
        dropping.start()
        dropping.join()
        assert cuda.registered
