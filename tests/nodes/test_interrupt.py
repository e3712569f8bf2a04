"""What nodes show of the calls within a stage, and that an interrupt waits for one call at most."""

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
    ("family", "before"),
    [
        ("svd", ["image encoder, call", "encoding image, part"]),
        ("1.5-i2v", ["encoding image, part"]),
        ("5b from a video", ["encoding video, part"]),
        ("2b", []),
    ],
)
def test_a_sampler_tells_what_it_encodes_before_its_steps(
    model_folder: Callable[..., Path],
    without_comfyui: None,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    before: list[str],
) -> None:
    told: list[str] = []
    update = host.Progress.update
    graph = GRAPHS[family]
    pipeline = graph.load(model_folder(family.split()[0]), precision="fp32")
    prompts = graph.encode(pipeline)["result"] if graph.prompted else ()
    monkeypatch.setattr(
        host.Progress,
        "update",
        lambda self, done, text, *more, **named: (told.append(text), update(self, done, text, *more, **named)),
    )
    graph.sample(pipeline, prompts)
    assert [text for text in told if text.startswith("loading ")]
    told = [text for text in told if not text.startswith("loading")]
    encoding = [text for text in told if not text.startswith("step")]
    assert encoding == [f"{what} 1 of 1" for what in before for _ in ("begun", "done")]
    assert told[: len(encoding)] == encoding and told[len(encoding)].startswith("step 1/")


@pytest.fixture
def pipeline(model_folder: Callable[..., Path], without_comfyui: None) -> Any:
    return GRAPHS["2b"].load(model_folder("2b"), precision="fp32")


def interrupted_in(call_number: int, module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Asks for an interrupt while `module` is called that often, counted from 1. Returns the numbers of all calls, but
    for those on "meta", by which memory is estimated."""
    calls: list[int] = []
    forward = module.forward

    def asking(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, torch.Tensor) and value.is_meta for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        calls.append(len(calls) + 1)
        if calls[-1] == call_number:
            host.interrupt()
        return forward(*args, **kwargs)

    monkeypatch.setattr(module, "forward", functools.wraps(forward)(asking))  # diffusers asks for its parameters
    return calls


@pytest.mark.parametrize("asked_in", [1, 2, 3])
def test_an_interrupt_while_decoding_waits_for_one_call(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, asked_in: int
) -> None:
    latents = {"samples": torch.randn(1, 16, 7, 4, 6, generator=torch.Generator().manual_seed(2))}
    expected = GRAPHS["2b"].decode(pipeline, latents)["result"][0]
    module = pipeline.store.module("vae", "fp32")
    with monkeypatch.context() as patch:
        calls = interrupted_in(asked_in, module.decoder, patch)
        with pytest.raises(host.Interrupted, match=f"at decoding part {min(asked_in + 1, 3)} of 3"):
            GRAPHS["2b"].decode(pipeline, latents)
    assert calls == list(range(1, asked_in + 1))
    go_on()  # as the next run does
    assert torch.equal(GRAPHS["2b"].decode(pipeline, latents)["result"][0], expected)
    assert pipeline.store.module("vae", "fp32") is module


def go_on() -> None:
    """Take the interrupt back."""
    asked = host._interrupt.get()
    assert asked
    asked.clear()


def test_an_interrupt_while_encoding_prompts_waits_for_one_call(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text_encoder = pipeline.store.module("text_encoder", "fp32")
    with monkeypatch.context() as patch:
        calls = interrupted_in(1, text_encoder, patch)
        with pytest.raises(host.Interrupted, match="at encoding prompt 2 of 2"):
            GRAPHS["2b"].encode(pipeline)
    assert calls == [1] and "text_encoder" in pipeline.store.loaded(), "it rests as ever"
    go_on()
    encoded = GRAPHS["2b"].encode(pipeline)["result"]
    assert all(torch.isfinite(tensor).all() for ((tensor, _),) in encoded)


def test_an_interrupt_while_a_sampler_encodes_comes_before_its_first_step(
    model_folder: Callable[..., Path], without_comfyui: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = GRAPHS["svd"]
    pipeline = graph.load(model_folder("svd"), precision="fp32")
    with monkeypatch.context() as patch:
        calls = interrupted_in(1, pipeline.store.module("vae", "fp32").encoder, patch)
        steps = interrupted_in(0, pipeline.store.module("unet", "fp32"), patch)
        with pytest.raises(host.Interrupted, match="at encoding image, part 1 of 1"):
            graph.sample(pipeline)
    assert (calls, steps) == ([1], [])
    go_on()
    assert torch.isfinite(graph.sample(pipeline)["result"][0]["samples"]).all()
