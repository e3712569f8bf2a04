"""Progress that a run receives while blocks are compiled, and the limit on compiled sizes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile.backends import BackendChoice, CompileOptions, compiled
from comfyui_onediff_guard.pipelines.compile.block import COMPILED_SIZES, graphs_compiled, listening
from in_blocks import Denoiser

pytestmark = pytest.mark.usefixtures("traced_alone")
BLOCKS = 4
LIMIT = f"inductor reached its limit of {COMPILED_SIZES} sizes"


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + x.shape[-1]


def denoiser() -> Denoiser:
    return Denoiser(Scaled() for _ in range(BLOCKS))


class Host:
    def __init__(self) -> None:
        self.progress: list[str] = []
        self.notes: list[str] = []

    def call(self, module: torch.nn.Module, size: int) -> torch.Tensor:
        with torch.inference_mode(), listening(self.progressed, self.notes.append):
            return module(torch.ones(1, size))

    def progressed(self, text: str) -> None:
        self.progress.append(text.split(" · ")[0])  # without the remaining time, which depends on the clock


def compiled_copy(network: torch.nn.Module, *, dynamic: bool | None = None) -> torch.nn.Module:
    return compiled(network, ("blocks",), BackendChoice("inductor", ""), CompileOptions(dynamic))


def test_each_block_reports_compiling_only_for_new_sizes() -> None:
    module, host = compiled_copy(denoiser()), Host()
    host.call(module, 3)
    assert host.progress == [f"inductor: compiling block {n} of {BLOCKS}" for n in range(1, BLOCKS + 1)]
    host.call(module, 3)
    assert len(host.progress) == BLOCKS
    host.call(module, 4)
    assert len(host.progress) == 2 * BLOCKS and not host.notes
    module(torch.ones(1, 5))  # with nobody listening


def test_next_call_after_interrupted_compiling_is_right() -> None:
    module, host = compiled_copy(denoiser()), Host()

    def interrupt(text: str) -> None:
        if "block 3" in text:
            raise KeyboardInterrupt(text)

    with pytest.raises(KeyboardInterrupt, match="block 3"), listening(interrupt, host.notes.append):
        module(torch.ones(1, 3))
    assert torch.equal(host.call(module, 3), denoiser()(torch.ones(1, 3)))
    assert host.progress == [f"inductor: compiling block {n} of {BLOCKS}" for n in (3, 4)], "two were compiled already"


def test_sizes_beyond_limit_run_uncompiled_with_note(caplog: pytest.LogCaptureFixture) -> None:
    module, host = compiled_copy(denoiser(), dynamic=False), Host()
    for size in range(2, 2 + COMPILED_SIZES):
        before = graphs_compiled()
        host.call(module, size)
        assert graphs_compiled() - before == 1 and not host.notes, size
    before = graphs_compiled()
    with caplog.at_level(logging.WARNING, "comfyui_onediff_guard"):
        for size in (50, 51):
            assert torch.equal(host.call(module, size), denoiser()(torch.ones(1, size)))
    assert len(host.notes) == 2 * BLOCKS and set(host.notes) == {host.notes[0]} and LIMIT in host.notes[0]
    assert len([message for message in caplog.messages if LIMIT in message]) == 1, "the log says it once"
    said = len(host.progress)
    for size in range(2, 2 + COMPILED_SIZES):
        host.call(module, size)
    assert graphs_compiled() == before and len(host.notes) == 2 * BLOCKS and len(host.progress) == said


def test_graphs_compiled_by_others_are_not_counted() -> None:
    module, host = compiled_copy(denoiser(), dynamic=True), Host()
    for size in range(2, 12):
        host.call(module, size)
        torch.compile(lambda x, k=size: x * k, backend="eager")(torch.ones(2))
    assert not host.notes


@torch._dynamo.config.patch(recompile_limit=2)
def test_recompile_limit_of_dynamo_is_kept_but_not_applied_to_blocks() -> None:
    """Blocks of several kinds that share code, as in a UNet, need more graphs for it than dynamo allows."""

    class Kind(torch.nn.Module):
        def __init__(self, number: int):
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.number

    module, host = compiled_copy(Denoiser(map(Kind, range(5))), dynamic=False), Host()
    before = graphs_compiled()
    host.call(module, 2)
    assert graphs_compiled() - before == 5
    assert torch._dynamo.config.recompile_limit == 2


def slices(*shape: int) -> torch.Tensor:
    """A tensor with the strides of a larger one."""
    return torch.ones(shape[0], 2 * shape[1], *shape[2:])[:, : shape[1]]


@pytest.mark.parametrize(
    "given",
    [
        [torch.ones(2, 3, 4), slices(2, 3, 4)],
        [slices(2, 3, 4, 5), torch.ones(2, 3, 4, 5)],
        [torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        [torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)],
    ],
    ids=["slices", "of four dimensions", "channels last", "channels last in 3D"],
)
def test_compiled_block_gets_contiguous_inputs(given: list[torch.Tensor]) -> None:
    module, before = compiled_copy(denoiser()), graphs_compiled()
    for x in given:
        last = {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(x.ndim, [])
        dense = any(x.is_contiguous(memory_format=layout) for layout in (torch.contiguous_format, *last))
        expected = denoiser()(x if dense else x.contiguous())
        with torch.no_grad():
            made = module(x)
        assert torch.equal(made, expected) and made.stride() == expected.stride()
    assert graphs_compiled() - before == 1


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


@pytest.mark.parametrize("between", [(), (7,), (3, 5), (12,)])
def test_same_call_uses_same_graph_whatever_sizes_ran_between(
    monkeypatch: pytest.MonkeyPatch, between: tuple[int, ...]
) -> None:
    """As in a UNet, whose blocks of one class run at several sizes: the first size gets its own graph, and the second
    one for all sizes, which fits the first, too."""
    from onediff.infer_compiler.backends import registry

    graphs, ran = [], []

    def noting(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        number = len(graphs)
        graphs.append(graph)
        return lambda *args: (ran.append(number), graph.forward(*args))[1]

    def compiling(module: torch.nn.Module, *, options: Any = None) -> Any:
        return torch.compile(module, backend=noting, dynamic=options["dynamic"])

    monkeypatch.setitem(registry._BACKENDS, "inductor", compiling)
    torch._dynamo.reset()
    module, host = compiled_copy(Denoiser([Scaled(), Doubled(), Scaled(), Doubled(), Scaled()])), Host()
    made: list[list[int]] = []
    for size in (3, *between, 3, 3):
        ran.clear()
        host.call(module, size)
        made.append([*ran])
    first, *_, later, last = made
    assert len(set(first)) > 2 and first == later == last
    torch._dynamo.reset()
