"""Decoding with compiled calls of equal shape: the same pictures, one graph, and no recompiling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import auto_compile
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, BackendChoice
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle
from comfyui_onediff_guard.precision.report import RunReport
from onediff.infer_compiler.backends import registry
from small_runs import opened

LATENTS = {  # model → (shape of latents, decode settings)
    "svd": ((7, 4, 8, 8), {"chunk": 3}),
    "2b": ((1, 16, 9, 8, 12), {}),
    "cogview3": ((3, 16, 8, 8), {"chunk": 1}),
    "wan": ((1, 16, 5, 8, 8), {}),
    "wan-ti2v": ((1, 48, 5, 4, 4), {}),
}
COMPILED_CALLS = {  # of all calls; the last chunk, or the first ones, differ in shape
    "svd": "2 of 3 calls, of latents 3×4×8×8",
    "2b": "2 of 4 calls, of latents 1×16×2×8×12",
    "cogview3": "3 of 3 calls, of latents 1×16×8×8",
    "wan": "3 of 5 calls, of latents 1×16×1×8×8",
    "wan-ti2v": "3 of 5 calls, of latents 1×48×1×4×4",
}
pytestmark = pytest.mark.usefixtures("traced_alone")


def run(
    handle: PipelineHandle, model: str, seed: int = 0, *, larger: bool = False, **how: Any
) -> tuple[torch.Tensor, RunReport]:
    shape, usual = LATENTS[model]
    latents = torch.randn((*shape[:-1], shape[-1] + 4 * larger), generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        return decode(handle, latents, **{**usual, **how})


@pytest.mark.parametrize("model", LATENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_calls_of_equal_shape_share_one_graph(model: str, precision: str) -> None:
    """Traced by dynamo and run uncompiled, the result is bit-equal."""
    handle = opened(model, precision=precision)
    plain, eager = run(handle, model, backend=EAGER)
    assert (eager.backend, eager.graphs) == (EAGER, None)
    pixels, report = run(handle, model, backend="inductor")
    assert torch.equal(pixels, plain)
    assert (report.backend, report.graphs) == ("inductor", 1)
    assert report.backend_reason == f"as you chose; compiled: {COMPILED_CALLS[model]}"
    other, report = run(handle, model, seed=1, backend="inductor")
    assert report.graphs == 0 and not torch.equal(other, pixels), "other latents: another seed, another prompt"
    assert torch.equal(run(handle, model, backend=EAGER)[0], plain), "the VAE is unchanged"


def test_full_tiles_share_one_graph_and_smaller_ones_run_uncompiled() -> None:
    handle = opened("cogview3")
    latents = torch.randn(1, 16, 20, 20, generator=torch.Generator().manual_seed(0))
    plain, _ = decode(handle, latents, tiling=True, backend=EAGER)
    pixels, report = decode(handle, latents, tiling=True, backend="inductor")
    assert torch.equal(pixels, plain) and report.graphs == 1
    assert "9 of 16 calls, of latents 1×16×8×8" in report.backend_reason


def test_failing_compiled_call_is_recomputed_without_new_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiled code returns NaN in one call: that call is recomputed in fp32, and the result stays close."""
    handle = opened("2b", precision="bf16")
    monkeypatch.setitem(registry._BACKENDS, "inductor", broken_in(1))
    torch.compiler.reset()
    pixels, report = run(handle, "2b", backend="inductor")
    assert [step.outcome for step in report.steps] == ["finite", "finite", "rerun", "finite"]
    assert (report.steps[2].dtype, report.graphs) == ("fp32", 1)
    assert pixels.isfinite().all()
    monkeypatch.setitem(registry._BACKENDS, "inductor", broken_in(None))
    handle.store.compiled.clear()
    healthy, _ = run(handle, "2b", backend="inductor")
    assert (pixels - healthy).abs().max() < 0.1 and not torch.equal(pixels, healthy)


def broken_in(failing: int | None) -> Any:
    """A backend that traces with dynamo and returns NaN in this one of its calls, counted from 1."""

    def compile_block(module: torch.nn.Module, *, options: Any) -> Any:
        traced, calls = torch.compile(module, backend="eager", **options), iter(range(1, 1000))

        def call(*args: Any, **kwargs: Any) -> Any:
            made, cache = traced(*args, **kwargs)
            return (made * torch.nan if next(calls) == failing else made), cache

        return call

    return compile_block


def test_out_of_memory_in_compiled_code_decodes_fewer_frames_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, (shape, _) = opened("svd"), LATENTS["svd"]
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def compile_block(module: torch.nn.Module, *, options: Any) -> Any:
        traced = torch.compile(module, backend="eager", **options)

        def call(shown: bool, x: torch.Tensor, **kwargs: Any) -> Any:
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return traced(shown, x, **kwargs)

        return call

    monkeypatch.setitem(registry._BACKENDS, "inductor", compile_block)
    pixels, report = decode(handle, latents, backend="inductor")
    assert torch.equal(pixels, decode(handle, latents, chunk=3, backend=EAGER)[0])
    assert report.graphs == 1 and "compiled: 2 of 3 calls, of latents 3×4×8×8" in report.backend_reason
    assert any("3 at once" in note for note in report.notes)


@pytest.mark.parametrize("model", ["2b", "cogview3"])
def test_auto_compiles_size_after_enough_time_in_eager_calls(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_compile, "_eager_seconds", {})
    auto = BackendChoice("inductor", "auto: first choice", automatic=True)
    handle = replace(opened(model), backend=auto)
    plain, first = run(handle, model)
    assert (first.backend, first.graphs) == (EAGER, None) and "not compiled yet" in first.backend_reason
    monkeypatch.setattr(auto_compile, "COMPILE_SECONDS", 1e-9)
    pixels, second = run(handle, model)
    assert (second.backend, second.graphs) == ("inductor", 1) and torch.equal(pixels, plain)
    third = run(handle, model)[1]
    assert third.graphs == 0 and "compiled already" in third.backend_reason
    other = run(handle, model, larger=True)[1]
    assert "not compiled yet" in other.backend_reason, "another size is another graph"


@pytest.mark.parametrize(
    ("pipeline_backend", "node_backend", "expected"),
    [
        (BackendChoice(EAGER, "as you chose: nothing is compiled"), "auto", EAGER),
        (BackendChoice(EAGER, "as you chose: nothing is compiled"), "inductor", "inductor"),
        (BackendChoice("inductor", "as you chose"), "auto", EAGER),  # at first
        (BackendChoice("inductor", "as you chose"), EAGER, EAGER),
    ],
)
def test_backend_of_node_overrides_backend_of_pipeline(
    pipeline_backend: BackendChoice, node_backend: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_compile, "_eager_seconds", {})
    report = run(replace(opened("svd"), backend=pipeline_backend), "svd", backend=node_backend)[1]
    assert report.backend == expected
