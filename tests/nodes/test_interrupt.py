"""Progress of calls within a stage on nodes, and interrupts, which wait for one call at most."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from as_comfyui import GRAPHS
from comfyui_onediff_guard.comfyui_host import host


@pytest.mark.parametrize(
    ("family", "encoded"),
    [
        ("svd", ["image encoder, call", "encoding image, part"]),
        ("1.5-i2v", ["encoding image, part"]),
        ("5b from a video", ["encoding video, part"]),
        ("2b", []),
    ],
)
def test_sampler_shows_encoding_before_its_steps(
    model_folder: Callable[..., Path],
    without_comfyui: None,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    encoded: list[str],
) -> None:
    texts: list[str] = []
    update = host.Progress.update
    graph = GRAPHS[family]
    pipeline = graph.load(model_folder(family.split()[0]), precision="fp32")
    prompts = graph.encode(pipeline)["result"] if graph.prompted else ()
    monkeypatch.setattr(
        host.Progress,
        "update",
        lambda self, done, text, *more, **named: (texts.append(text), update(self, done, text, *more, **named)),
    )
    graph.sample(pipeline, prompts)
    assert [text for text in texts if text.startswith("loading ")]
    texts = [text for text in texts if not text.startswith("loading")]
    encoding = [text for text in texts if not text.startswith("step")]
    assert encoding == [f"{part} 1 of 1" for part in encoded for _ in ("begun", "done")]
    assert texts[: len(encoding)] == encoding and texts[len(encoding)].startswith("step 1/")


@pytest.fixture
def pipeline(model_folder: Callable[..., Path], without_comfyui: None) -> Any:
    return GRAPHS["2b"].load(model_folder("2b"), precision="fp32")


def interrupted_during(call_number: int, module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Request an interrupt in this call of `module`, counted from 1. Returns the numbers of all calls, except those
    on "meta", which estimate memory."""
    calls: list[int] = []
    forward = module.forward

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        calls.append(len(calls) + 1)
        if calls[-1] == call_number:
            host.interrupt()
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "forward", functools.wraps(forward)(interrupting))  # diffusers inspects its parameters
    return calls


@pytest.mark.parametrize("call_number", [1, 2, 3])
def test_interrupt_while_decoding_waits_for_one_call(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, call_number: int
) -> None:
    latents = {"samples": torch.randn(1, 16, 7, 4, 6, generator=torch.Generator().manual_seed(2))}
    expected = GRAPHS["2b"].decode(pipeline, latents)["result"][0]
    module = pipeline.store.module("vae", "fp32")
    with monkeypatch.context() as patch:
        calls = interrupted_during(call_number, module.decoder, patch)
        with pytest.raises(host.Interrupted, match=f"at decoding part {min(call_number + 1, 3)} of 3"):
            GRAPHS["2b"].decode(pipeline, latents)
    assert calls == list(range(1, call_number + 1))
    clear_interrupt()  # as the next run does
    assert torch.equal(GRAPHS["2b"].decode(pipeline, latents)["result"][0], expected)
    assert pipeline.store.module("vae", "fp32") is module


def clear_interrupt() -> None:
    """Clear the interrupt."""
    flag = host._interrupt.get()
    assert flag
    flag.clear()


def test_interrupt_while_encoding_prompts_waits_for_one_call(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text_encoder = pipeline.store.module("text_encoder", "fp32")
    with monkeypatch.context() as patch:
        calls = interrupted_during(1, text_encoder, patch)
        with pytest.raises(host.Interrupted, match="at encoding prompt 2 of 2"):
            GRAPHS["2b"].encode(pipeline)
    assert calls == [1] and "text_encoder" in pipeline.store.loaded(), "it stays loaded as usual"
    clear_interrupt()
    encoded = GRAPHS["2b"].encode(pipeline)["result"]
    assert all(torch.isfinite(tensor).all() for ((tensor, _),) in encoded)


def test_interrupt_while_sampler_encodes_ends_run_before_first_step(
    model_folder: Callable[..., Path], without_comfyui: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = GRAPHS["svd"]
    pipeline = graph.load(model_folder("svd"), precision="fp32")
    with monkeypatch.context() as patch:
        calls = interrupted_during(1, pipeline.store.module("vae", "fp32").encoder, patch)
        steps = interrupted_during(0, pipeline.store.module("unet", "fp32"), patch)
        with pytest.raises(host.Interrupted, match="at encoding image, part 1 of 1"):
            graph.sample(pipeline)
    assert (calls, steps) == ([1], [])
    clear_interrupt()
    assert torch.isfinite(graph.sample(pipeline)["result"][0]["samples"]).all()
