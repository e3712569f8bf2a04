"""The guard for ComfyUI's own models in comfyui 0.0.1, whose MODEL has no wrappers: it says so, and guards VAEs."""

from __future__ import annotations

from collections.abc import Iterator

import legs
import native_checkpoints
import numpy as np
import pytest
from native_graphs import FILE, GUARDED, HOT, SIZE, graph, make
from runs import frames_of

pytestmark = [
    pytest.mark.comfyui,
    pytest.mark.parametrize("any_leg", legs.LEGS[:1], indirect=True, ids=[legs.LEGS[0].id]),
]


@pytest.fixture(scope="module", autouse=True)
def _checkpoint(server: legs.Server) -> Iterator[None]:
    checkpoint = server.base / "models" / "checkpoints" / (HOT + FILE)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    native_checkpoints.write_sd15(checkpoint, overflows=True)
    yield
    checkpoint.unlink()


def test_the_guard_of_models_says_what_is_missing_and_lets_the_run_go_on(server: legs.Server) -> None:
    unguarded = make(server, graph(hot=True, without={"model"}))
    server.forget()
    guarded = make(server, graph(hot=True))
    assert guarded.frames.shape == (*SIZE, 3) and guarded.frames.std() > 2
    assert np.array_equal(guarded.frames, unguarded.frames)
    assert "Update ComfyUI" in guarded.report("Not guarded: This ComfyUI cannot wrap a MODEL's apply_model")


def test_the_guard_of_vaes_works(server: legs.Server) -> None:
    server.forget()
    plain = make(server, graph(hot=True, without=GUARDED))
    guarded = make(server, graph(hot=True, without={"model"}))
    assert plain.frames.max() == 0
    assert guarded.frames.std() > 2
    assert "1 part, 1 recomputed in fp32" in guarded.report("VAE decoder: AutoencoderKL computes in fp16")
    assert len(server.profiles()) == 1, "what was learned is kept for later runs"


def test_guard_every_workflow_guards_vaes_and_lets_models_run_on(server: legs.Server) -> None:
    by_hand = make(server, graph(hot=True, without={"model"}))
    server.forget()
    before = len(server.log_text())
    prompt = graph(hot=True, without=GUARDED)
    (file,) = server.files_of(server.run(prompt, onediff_guard=True))
    assert np.array_equal(frames_of(file), by_hand.frames)
    log = server.log_text()[before:]
    assert "guards nothing: This ComfyUI cannot wrap a MODEL's apply_model" in log
    assert "1 part, 1 recomputed in fp32" in log and "Traceback" not in log
