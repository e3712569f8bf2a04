"""Our pipelines under ComfyUI's own memory manager: moves that fail, and the room that a call asks for."""

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
PARTS = (1.5, 0.8, 0.5, 0.3, 0.05)  # of what a run takes
REFUSED = "there is not enough memory"


def opened(model: str, folder: Path, offload: str = "none") -> Any:
    return moving.opened(BUILDERS[model](folder / model), offload, host.placement())


@pytest.fixture
def small_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The card, whose size may be set; ComfyUI keeps nothing of it free."""
    for name in ("minimum_inference_memory", "extra_reserved_memory"):
        monkeypatch.setattr(MANAGEMENT, name, lambda: 0)
    total = card.total()
    yield card
    card.set_total(total)


@pytest.fixture
def moves() -> Iterator[Any]:
    """Those to the card that ComfyUI's manager manages."""
    moves = moving.Moves()
    yield moves
    moves.end()


@pytest.mark.parametrize(("before", "offload"), moving.CASES)
def test_the_next_run_is_right_whichever_move_failed(moves: Any, tmp_path: Path, before: str, offload: str) -> None:
    model = BUILDERS["2b"](tmp_path / "2b")
    lora = import_module("trained_lora").train_lora(tmp_path, model)
    assert type(host.placement()).__name__ == "ComfyPlacement"

    def begun() -> Any:
        MANAGEMENT.unload_all_models()
        handle = moving.opened(model, offload, host.placement())
        moving.BEFORE[before](handle, lora)
        return moving.add_lora(handle, lora) if before == "a LoRA" else handle

    assert not moving.what_is_wrong(moves, begun)
    counted = sum(loaded.model_loaded_memory() for loaded in MANAGEMENT.current_loaded_models)
    assert counted == sum(moving.there(loaded.model.component) for loaded in MANAGEMENT.current_loaded_models)


def test_a_run_survives_where_memory_ran_out_once(tmp_path: Path) -> None:
    """All of the denoiser is on the card at each of its calls: what the manager had moved out for room is back."""
    handle = opened("2b", tmp_path)
    expected, _ = small_runs.sampled(handle, "2b")
    transformer = handle.store.components["transformer"].module
    size = moving.there(transformer)
    there: list[bool] = []

    def called(*_: Any) -> None:
        there.append(moving.there(transformer) == size)
        if len(there) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    transformer.transformer_blocks[1].register_forward_pre_hook(called)
    latents, report = small_runs.sampled(handle, "2b")
    assert there == [True] * 3
    assert torch.equal(latents, expected)
    said = [note for note in report.notes if "memory ran out" in note]
    assert said == ["denoiser: memory ran out; went on with nothing else on the device"]


def test_the_manager_makes_the_room_that_a_call_asks_for(small_card: Any, moves: Any, tmp_path: Path) -> None:
    handle = opened("5b-i2v", tmp_path)
    run = partial(small_runs.sampled, handle, "5b-i2v")
    run()
    beside = max(bytes_ for key, (bytes_, _) in handle.store.room.items() if key[0] == "transformer")
    vae, transformer = handle.store.components["vae"].module, handle.store.components["transformer"].module
    weights, beside_it = moving.there(vae, transformer), list[bool]()
    transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: beside_it.append(moving.there(vae) > 0))
    for more, stays in ((0.5, False), (2.5, True)):  # room for the weights alone, and for the call too
        MANAGEMENT.unload_all_models()
        small_card.set_total(int(1.1 * weights + more * beside))  # the manager takes weights for a tenth more
        beside_it.clear()
        run()
        before = moves.n
        run()
        assert any(beside_it) == stays, "the VAE, while the denoiser computed"
    assert moves.n == before, "what was used before is found on the card"


@pytest.mark.parametrize("model", small_runs.SIZES)
def test_offload_auto_fits_the_card(small_card: Any, tmp_path: Path, model: str) -> None:
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
        assert not any("memory ran out" in note for note in notes)
        off = ((frames - expected).norm() / expected.norm()).item()
        assert off <= 1e-3 or {"tiling", "2 at once", "1 at once"} & ways
        found.append(ways)
    assert found[0] == {"none", "whole"} and found[-1] == {REFUSED}
    assert any(ways - {"none", "whole"} for ways in found[1:-1])
