"""Our pipelines with ComfyUI's own memory manager: failed moves, memory for a call, and offload "auto"."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from in_comfyui import OURS, import_ours

import_ours()
moving, small_runs = import_module("moving"), import_module("small_runs")
BUILDERS = {**import_module("small_families").BUILDERS, "wan": import_module("small_wan").build_wan}
host = import_module(f"{OURS}.comfyui_host.host")
decode = import_module(f"{OURS}.pipelines.run.decode").decode
NoRoom = import_module(f"{OURS}.pipelines.weights.placement").NoRoom
MANAGEMENT = import_module("comfy.model_management")
card = import_module("second_device").card
PARTS = (1.5, 0.8, 0.5, 0.3, 0.05)  # of the memory that a run takes
REFUSED = "not enough memory"


def opened(model: str, folder: Path, offload: str = "none") -> Any:
    return moving.opened(BUILDERS[model](folder / model), offload, host.placement())


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The card with a settable size, of which ComfyUI reserves nothing."""
    for name in ("minimum_inference_memory", "extra_reserved_memory"):
        monkeypatch.setattr(MANAGEMENT, name, lambda: 0)
    total = card.total()
    yield card
    card.set_total(total)


@pytest.fixture
def moves() -> Iterator[Any]:
    """Moves to the card that ComfyUI's manager makes."""
    moves = moving.Moves()
    yield moves
    moves.end()


@pytest.mark.parametrize(("before", "offload"), moving.CASES)
def test_next_run_is_correct_after_any_failed_move(moves: Any, tmp_path: Path, before: str, offload: str) -> None:
    model = BUILDERS["2b"](tmp_path / "2b")
    lora = import_module("trained_lora").train_lora(tmp_path, model)
    assert type(host.placement()).__name__ == "ComfyPlacement"

    def open_and_prepare() -> Any:
        MANAGEMENT.unload_all_models()
        handle = moving.opened(model, offload, host.placement())
        moving.BEFORE[before](handle, lora)
        return moving.add_lora(handle, lora) if before == "a LoRA" else handle

    assert not moving.failures_after_oom(moves, open_and_prepare)
    counted = sum(loaded.model_loaded_memory() for loaded in MANAGEMENT.current_loaded_models)
    assert counted == sum(moving.card_bytes(loaded.model.component) for loaded in MANAGEMENT.current_loaded_models)


def test_run_is_bit_equal_after_running_out_of_memory_once(tmp_path: Path) -> None:
    """The whole denoiser is on the card at each of its calls: the manager reloads the weights that it offloaded."""
    handle = opened("2b", tmp_path)
    expected, _ = small_runs.sampled(handle, "2b")
    transformer = handle.store.components["transformer"].module
    size = moving.card_bytes(transformer)
    on_card: list[bool] = []

    def called(*_: Any) -> None:
        on_card.append(moving.card_bytes(transformer) == size)
        if len(on_card) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    transformer.transformer_blocks[1].register_forward_pre_hook(called)
    latents, report = small_runs.sampled(handle, "2b")
    assert on_card == [True] * 3
    assert torch.equal(latents, expected)
    said = [note for note in report.notes if "out of memory" in note]
    assert said == ["denoiser: out of memory, fell back to nothing else on the device"]


def test_manager_frees_memory_that_call_asks_for(small_card: Any, moves: Any, tmp_path: Path) -> None:
    handle = opened("5b-i2v", tmp_path)
    run = partial(small_runs.sampled, handle, "5b-i2v")
    run()
    call_memory = max(bytes_ for key, (bytes_, _) in handle.store.room.items() if key[0] == "transformer")
    vae, transformer = handle.store.components["vae"].module, handle.store.components["transformer"].module
    weights, vae_on_card = moving.card_bytes(vae, transformer), list[bool]()
    transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda *_: vae_on_card.append(moving.card_bytes(vae) > 0)
    )
    for more, stays in ((0.5, False), (2.5, True)):  # memory only for the weights, and for the call too
        MANAGEMENT.unload_all_models()
        small_card.set_total(int(1.1 * weights + more * call_memory))  # the manager counts a tenth more for weights
        vae_on_card.clear()
        run()
        before = moves.n
        run()
        assert any(vae_on_card) == stays, "whether the VAE stayed on the card"
    assert moves.n == before, "used weights are still on the card"


@pytest.mark.parametrize("model", small_runs.SIZES)
def test_offload_auto_chooses_mode_that_fits_card(small_card: Any, tmp_path: Path, model: str) -> None:
    handle = opened(model, tmp_path, "auto")

    def run() -> tuple[Any, list[str]]:
        handle.store.prompts.clear()
        latents, sampled = small_runs.sampled(handle, model)
        frames, decoding = decode(handle, latents)
        return frames.cpu(), [note for each in (sampled, *sampled.before, decoding) for note in each.notes]

    expected, _ = run()
    MANAGEMENT.unload_all_models()
    card.reset_most_used()
    run()
    most, found = card.most_used(), list[set[str]]()
    for part in PARTS:
        MANAGEMENT.unload_all_models()
        small_card.set_total(int(part * most))
        try:
            frames, notes = run()
        except NoRoom as error:
            found.append({REFUSED} if REFUSED in str(error) else set())
            continue
        ways = {note.partition("chose ")[2].partition(":")[0] for note in notes if "auto chose" in note}
        assert not any("out of memory" in note for note in notes)
        error_norm = ((frames - expected).norm() / expected.norm()).item()
        assert error_norm <= 1e-3 or {"tiling", "2 at once", "1 at once"} & ways
        found.append(ways)
    assert found[0] == {"none", "whole"} and found[-1] == {REFUSED}
    assert any(ways - {"none", "whole"} for ways in found[1:-1])
