"""NaN Guard (native) in comfyui 0.0.1, whose MODEL has no wrappers: it reports this, and guards VAEs."""

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


def test_model_guard_reports_missing_wrapper_and_run_is_unchanged(server: legs.Server) -> None:
    unguarded = make(server, graph(hot=True, without={"model"}))
    server.forget()
    guarded = make(server, graph(hot=True))
    assert guarded.frames.shape == (*SIZE, 3) and guarded.frames.std() > 2
    assert np.array_equal(guarded.frames, unguarded.frames)
    assert "Update ComfyUI" in guarded.report("Not guarded: This ComfyUI cannot wrap a MODEL's apply_model")


def test_vae_guard_recomputes_overflowing_decoder(server: legs.Server) -> None:
    server.forget()
    plain = make(server, graph(hot=True, without=GUARDED))
    guarded = make(server, graph(hot=True, without={"model"}))
    assert plain.frames.max() == 0
    assert guarded.frames.std() > 2
    assert "1 part, 1 recomputed in fp32" in guarded.report("VAE decoder: AutoencoderKL runs in fp16")
    assert len(server.profiles()) == 1, "a profile is saved for later runs"


def test_guard_every_workflow_guards_vae_and_skips_model(server: legs.Server) -> None:
    by_hand = make(server, graph(hot=True, without={"model"}))
    server.forget()
    before = len(server.log_text())
    prompt = graph(hot=True, without=GUARDED)
    (file,) = server.files_of(server.run(prompt, onediff_guard=True))
    assert np.array_equal(frames_of(file), by_hand.frames)
    log = server.log_text()[before:]
    assert "is not guarded: This ComfyUI cannot wrap a MODEL's apply_model" in log
    assert "1 part, 1 recomputed in fp32" in log and "Traceback" not in log
