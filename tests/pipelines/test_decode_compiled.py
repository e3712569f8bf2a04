"""A decode whose alike calls are compiled: the same pictures, one graph, and nothing compiled anew after that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from comfyui_onediff_guard.pipelines.compile import payoff
from comfyui_onediff_guard.pipelines.compile.backends import EAGER, BackendChoice
from comfyui_onediff_guard.pipelines.compile.decoder import Kind, Kinds, Most
from comfyui_onediff_guard.pipelines.models.recognised import family_of
from comfyui_onediff_guard.pipelines.run.decode import decode
from comfyui_onediff_guard.pipelines.run.handle import PipelineHandle, load
from comfyui_onediff_guard.pipelines.weights.placement import PlainPlacement
from comfyui_onediff_guard.precision.policy import Precision
from comfyui_onediff_guard.precision.report import RunReport
from comfyui_onediff_guard.trust.atomic_files import LIMIT_VARIABLE
from onediff.infer_compiler.backends import registry

LATENTS = {  # latents, and how they are decoded
    "svd": ((7, 4, 8, 8), {"chunk": 3}),
    "2b": ((1, 16, 7, 8, 12), {}),
    "cogview3": ((3, 16, 8, 8), {"chunk": 1}),
    "wan": ((1, 16, 5, 8, 8), {}),
    "wan-ti2v": ((1, 48, 5, 4, 4), {}),
}
ALIKE = {  # calls that are, of all: the last chunk, or the first ones, are of another kind
    "svd": "2 of 3 calls, of latents 3×4×8×8",
    "2b": "2 of 3 calls, of latents 1×16×2×8×12",
    "cogview3": "3 of 3 calls, of latents 1×16×8×8",
    "wan": "3 of 5 calls, of latents 1×16×1×8×8",
    "wan-ti2v": "3 of 5 calls, of latents 1×48×1×4×4",
}
pytestmark = pytest.mark.usefixtures("traced_alone")


def opened(folder: Path, precision: str = "fp32", backend: str = "inductor") -> PipelineHandle:
    options: dict[str, Any] = {"offload": "none", "placement": PlainPlacement()}
    return load(folder, family_of(folder), precision=Precision(precision), backend=backend, **options)


def run(handle: PipelineHandle, model: str, seed: int = 0, **how: Any) -> tuple[torch.Tensor, RunReport]:
    shape, usual = LATENTS[model]
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        return decode(handle, latents, **{**usual, **how})


@pytest.mark.parametrize("model", LATENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_calls_that_are_alike_share_one_graph(model_folder: Any, model: str, precision: str) -> None:
    """Traced by dynamo and run as it is, the result has the same bits."""
    handle = opened(model_folder(model), precision)
    plain, eager = run(handle, model, backend=EAGER)
    assert (eager.backend, eager.graphs) == (EAGER, None)
    pixels, report = run(handle, model, backend="inductor")
    assert torch.equal(pixels, plain)
    assert (report.backend, report.graphs) == ("inductor", 1)
    assert report.backend_reason == f"asked for; compiled: {ALIKE[model]}"
    other, report = run(handle, model, seed=1, backend="inductor")
    assert report.graphs == 0 and not torch.equal(other, pixels), "other latents: another seed, another prompt"
    assert torch.equal(run(handle, model, backend=EAGER)[0], plain), "nothing is left in the VAE"


def test_tiles_of_one_size_share_a_graph_and_ragged_ones_run_as_they_are(model_folder: Any) -> None:
    handle = opened(model_folder("cogview3"))
    latents = torch.randn(1, 16, 20, 20, generator=torch.Generator().manual_seed(0))
    plain, _ = decode(handle, latents, tiling=True, backend=EAGER)
    pixels, report = decode(handle, latents, tiling=True, backend="inductor")
    assert torch.equal(pixels, plain) and report.graphs == 1
    assert "9 of 16 calls, of latents 1×16×8×8" in report.backend_reason


def test_a_call_that_fails_is_computed_again_by_the_original_and_compiles_nothing(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was compiled puts out NaN in one call: the result has the bits of a decode whose call failed uncompiled."""
    handle = opened(model_folder("2b"), "bf16")
    monkeypatch.setitem(registry._BACKENDS, "inductor", broken_in(1))
    torch.compiler.reset()
    pixels, report = run(handle, "2b", backend="inductor")
    assert [step.outcome for step in report.steps] == ["finite", "rerun", "finite"]
    assert (report.steps[1].dtype, report.graphs) == ("fp32", 1)
    assert pixels.isfinite().all()
    monkeypatch.setitem(registry._BACKENDS, "inductor", broken_in(None))
    handle.store.compiled.clear()
    healthy, _ = run(handle, "2b", backend="inductor")
    assert (pixels - healthy).abs().max() < 0.1 and not torch.equal(pixels, healthy)


def broken_in(failing: int | None) -> Any:
    """Traces with dynamo; what is compiled puts out NaN in one of its calls, counted from 1, at no other."""

    def compile_block(module: torch.nn.Module, *, options: Any) -> Any:
        traced, calls = torch.compile(module, backend="eager", **options), iter(range(1, 1000))

        def call(*args: Any, **kwargs: Any) -> Any:
            made, cache = traced(*args, **kwargs)
            return (made * torch.nan if next(calls) == failing else made), cache

        return call

    return compile_block


def test_where_memory_runs_out_in_compiled_code_fewer_are_decoded_at_once(
    model_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, (shape, _) = opened(model_folder("svd")), LATENTS["svd"]
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
def test_auto_compiles_where_it_pays_and_remembers(
    model_folder: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "_MEASURED", {})
    monkeypatch.setenv(LIMIT_VARIABLE, "1")
    auto = BackendChoice("inductor", "auto: first choice", automatic=True)
    handle = replace(opened(model_folder(model)), backend=auto, compiled=tmp_path)
    plain, first = run(handle, model, chunk=0)
    assert (first.backend, first.graphs) == (EAGER, None)
    assert "not compiled: the first run at this size" in first.backend_reason
    (kept,) = tmp_path.glob("*.pace.json")
    assert json.loads(kept.read_text())["sizes"].keys() == {"latents " + size_of(first, model)}
    monkeypatch.setattr(payoff, "_MEASURED", {})
    monkeypatch.setattr(payoff, "COMPILE_GUESS", 1e9)
    assert "brings what it saves to" in run(handle, model, chunk=0)[1].backend_reason, "an earlier process measured"
    monkeypatch.setattr(payoff, "COMPILE_GUESS", 1e-9)
    pixels, second = run(handle, model, chunk=0)
    assert (second.backend, second.graphs) == ("inductor", 1) and torch.equal(pixels, plain)
    third = run(handle, model, chunk=0)[1]
    assert third.graphs in (0, None) and ("compiled already" in third.backend_reason or third.backend == EAGER)


def size_of(report: RunReport, model: str) -> str:
    assert report.steps
    return {"2b": "1×16×2×8×12", "cogview3": "3×16×8×8"}[model]


@pytest.mark.parametrize(
    ("own", "asked", "runs"),
    [
        (BackendChoice(EAGER, "asked for: not compiled"), "auto", EAGER),
        (BackendChoice(EAGER, "asked for: not compiled"), "inductor", "inductor"),
        (BackendChoice("inductor", "asked for"), "auto", EAGER),  # at first
        (BackendChoice("inductor", "asked for"), EAGER, EAGER),
    ],
)
def test_the_nodes_choice_goes_before_the_pipelines(
    model_folder: Any, own: BackendChoice, asked: str, runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payoff, "_MEASURED", {})
    report = run(replace(opened(model_folder("svd")), backend=own), "svd", backend=asked)[1]
    assert report.backend == runs


def test_the_kind_that_makes_up_most_of_the_work_is_compiled() -> None:
    def kind(*shape: int) -> Kind:
        return Kind.of((torch.empty(shape),), {})

    few_large, many_small = kind(1, 4, 8, 8), kind(1, 4, 2, 2)
    most = Most.of([many_small, few_large, few_large, *[many_small] * 5])
    assert most.kind == few_large and str(most) == "2 of 8 calls, of latents 1×4×8×8"
    assert most.seconds([1, 2, 3, 4]) == [2, 3]


def test_what_a_call_does_not_look_at_makes_no_graph_of_its_own() -> None:
    kinds = Kinds()

    def network(x: torch.Tensor, cache: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        _ = cache["unread"] is None
        return x + cache["read"].sum(), cache["handed on"], x[..., : cache["measured"].shape[0]]

    call = kinds.noting(kinds.looking(network))
    for length in (2, 3):
        cache = {name: torch.zeros(2) for name in ("read", "handed on", "measured")}
        call(torch.zeros(4), cache=cache | {"unread": torch.zeros(length)})
    assert kinds.calls[0] == kinds.calls[1] and len(kinds.calls[0].unread) == 1
    given = cache | {"unread": torch.zeros(5)}
    _, emptied = kinds.calls[0].without_unread((torch.zeros(4),), {"cache": given})
    assert {name: len(value) for name, value in emptied["cache"].items()} == {
        "read": 2,
        "handed on": 2,
        "measured": 2,
        "unread": 0,
    }
