"""What diffusers is told about CUDA's streams and page-locked memory, in order; none of it is run on CUDA."""

from __future__ import annotations

import mmap
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.weights import slab
from comfyui_onediff_guard.pipelines.weights.offload import InParts, Offload, in_parts
from diffusers.hooks import group_offloading
from page_locked import Cuda


class Recorder:
    """In place of ModuleGroup: what it is told, in order."""

    log: list[tuple[Any, ...]]

    def __init__(self, **given):
        self.given = given
        self.name = getattr(next(iter(given["parameters"]), None), "block", "rest")

    def onload_(self):
        Recorder.log.append(("onload", self.name))

    def offload_(self):
        Recorder.log.append(("offload", self.name))


class Block(torch.nn.Linear):
    def __init__(self, name, fails=False):
        super().__init__(2, 2)
        self.name = self.weight.block = name
        self.fails = fails

    def forward(self, input):  # noqa: A002 - torch's name
        Recorder.log.append(("compute", self.name))
        if self.fails:
            raise KeyError(self.name)
        return input


class Blocks(torch.nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.embed = torch.nn.Linear(2, 2, bias=False)
        self.blocks = torch.nn.ModuleList([Block("first"), Block("second", fails), Block("third")])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def runtime():
    return Cuda()


@pytest.fixture
def cuda(monkeypatch, runtime):
    """What InParts would tell CUDA."""

    class Stream:
        def __init__(self, device):
            self.device = device

        def synchronize(self):
            Recorder.log.append(("wait",))

    class Event:
        def record(self, stream):
            assert stream.device == torch.device("cuda", 0)
            self.after = Recorder.log[-1][-1]  # what computes

        def synchronize(self):
            Recorder.log.append(("done", self.after))

    Recorder.log = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(group_offloading, "ModuleGroup", Recorder)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(slab, "_take_error", runtime.take_error)
    return torch.device("cuda", 0)


def steps(weights, module):
    del Recorder.log[:]
    with weights:
        weights.shell(module)(torch.zeros(1, 2))


def test_on_cuda_the_next_block_is_on_its_way_while_one_computes(cuda, runtime):
    module = Blocks()
    weights = in_parts(module, Offload.GROUP, cuda)
    for group in (*weights._groups, weights._rest):
        assert group.given["stream"].device == cuda and group.given["record_stream"] and group.given["non_blocking"]
        assert group.given["onload_device"] == cuda and group.given["offload_device"] == torch.device("cpu")
        assert group.given["low_cpu_mem_usage"], "PyTorch page-locks no copy of them"
    assert weights._rest.given["parameters"] == [module.embed.weight]
    assert weights.most_bytes == 4 * (4 + 2 * 6), "what is in no block, and two blocks of three"
    steps(weights, module)
    assert len(runtime.registered) == 4, "each block and the rest, once"
    said = [entry for entry in Recorder.log if entry != ("wait",)]
    assert said == [
        ("onload", "rest"),
        ("onload", "first"),
        ("compute", "first"),
        ("onload", "second"),
        ("offload", "first"),
        ("compute", "second"),
        ("done", "first"),
        ("onload", "third"),
        ("offload", "second"),
        ("compute", "third"),
        ("offload", "third"),
        ("offload", "rest"),
    ]
    arrived = Recorder.log.index(("wait",), Recorder.log.index(("offload", "first")))
    assert arrived < Recorder.log.index(("compute", "second")), "a block waits for its own weights"


def test_on_cuda_sequential_brings_one_layer_at_a_time_and_pins_nothing_for_good(cuda, runtime):
    module = Blocks()
    module.embed.name = "embed"
    weights = in_parts(module, Offload.SEQUENTIAL, cuda)
    assert all(group.given["low_cpu_mem_usage"] and group.given["stream"] for group in weights._groups)
    steps(weights, module)
    assert not runtime.registered
    said = [entry for entry in Recorder.log if entry != ("wait",)]
    assert said[1:4] == [("onload", "first"), ("compute", "first"), ("offload", "first")]
    assert said[4:8] == [("done", "first"), ("onload", "second"), ("compute", "second"), ("offload", "second")]
    assert weights.most_bytes == 4 * 6


def test_on_cuda_what_is_let_go_after_use_is_not_pinned_for_good(cuda, runtime):
    weights = in_parts(Blocks(), Offload.GROUP, cuda, once=True)
    steps(weights, weights.component)
    assert not runtime.registered
    assert all(group.given["low_cpu_mem_usage"] for group in (*weights._groups, weights._rest))
    assert Recorder.log.index(("onload", "second")) < Recorder.log.index(("offload", "first"))


def test_on_cuda_without_enough_memory_to_pin_each_block_is_pinned_as_it_comes(cuda, runtime, caplog):
    runtime.limit = 2 * mmap.PAGESIZE
    module = Blocks()
    weights = in_parts(module, Offload.GROUP, cuda)
    for _ in range(2):
        steps(weights, module)
        assert Recorder.log.index(("onload", "second")) < Recorder.log.index(("offload", "first"))
    assert len(caplog.messages) == 1 and "(CUDA error: out of memory): slower" in caplog.messages[0]
    assert runtime.most_registered and not runtime.registered, "what was page-locked is given back"
    assert not runtime.error, "the next kernel would raise it"
    assert all(group.given["low_cpu_mem_usage"] for group in weights._groups)


def test_on_cuda_a_block_that_fails_goes_back(cuda):
    module = Blocks(fails=True)
    weights = in_parts(module, Offload.GROUP, cuda)
    with pytest.raises(KeyError, match="second"):
        steps(weights, module)
    away = [name for what, *name in Recorder.log if what == "offload"]
    assert sorted(map(str, *zip(*away, strict=True))) == ["first", "rest", "second"]
    assert isinstance(weights, InParts) and not weights._here


@pytest.mark.parametrize(("offload", "there"), [(Offload.GROUP, 2), (Offload.SEQUENTIAL, 1)])
def test_on_cuda_parts_do_not_pile_up_however_slow_the_device_is(cuda, offload, there):
    """What is sent away is there until the device has computed with it, which here it has when it is asked to be."""
    module = Blocks()
    module.embed = torch.nn.Identity()
    weights = in_parts(module, offload, cuda)
    steps(weights, module)
    here, most = set(), 0
    for what, name in [entry for entry in Recorder.log if len(entry) == 2 and entry[1] != "rest"]:
        if what == "onload":
            here.add(name)
        elif what == "done":
            here.discard(name)
        most = max(most, len(here))
    assert most == there


def test_on_cuda_a_call_brings_nothing_before_the_last_one_is_done(cuda):
    module = Blocks()
    weights = in_parts(module, Offload.GROUP, cuda)
    with weights:
        weights.shell(module)(torch.zeros(1, 2))
        again = len(Recorder.log)
        weights.shell(module)(torch.zeros(1, 2))  # both halves of a batch, one after the other
        assert Recorder.log.index(("done", "third")) < Recorder.log.index(("onload", "first"), again)
    ended = len(Recorder.log)
    with weights:
        said = [what for what, *_ in Recorder.log[ended:]]
    assert said.index("onload") == said.count("done"), "nor what is in no block"
