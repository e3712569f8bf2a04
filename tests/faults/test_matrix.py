"""Every fault in every stage: no partial files, no state left behind, and the next run is bit-equal.

Download failures by files and disks: tests/pipelines/test_hub.py and tests/headless/test_server_client.py.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import process_state
import pytest
import shared_models
import torch
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.headless.errors import OutputError
from comfyui_onediff_guard.pipelines.errors import BadFolder
from comfyui_onediff_guard.precision.guard import GuardStopped
from fake_comfy import FakeComfy, InterruptProcessingException
from faulty_stages import ModelStage, Stage, download, same, saving, server_download
from hub_files import ID, files_of
from hub_server import running_hub
from huggingface_hub import constants
from operations import Operations, full_disk, jumping_clock, kill_this_process, killed_in_a_child, raising, spread, tree
from tiers import by_tier

PLACES = by_tier(24, 3)  # number of operations of a stage, from first to last, that get a fault


class Broken(Exception):
    """An error that no code expects."""


ERRORS: dict[str, tuple[Callable[[], BaseException], ...]] = {
    "exception": (Broken,),
    "interrupt": (KeyboardInterrupt, lambda: host.Interrupted("stop"), InterruptProcessingException),
    "out of memory": (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),),
}
READING = ("load", "encode text", "encode image", "sample", "decode")
STAGES = (*READING, "save", "hub", "server")


def left_behind(stage: Stage, before: process_state.State) -> list[str]:
    others = {"thread", "descriptor"} if stage.served else set()
    return process_state.changes(before, [kind for kind in process_state.KINDS if kind not in others]) + marks(stage)


@pytest.fixture(autouse=True)
def _figure(figure: Callable[[str, object], None]) -> None:
    figure(f"{PLACES} operations of a stage: partial files, leftovers, wrong next runs", 0)


@pytest.fixture
def stage(
    request: pytest.FixtureRequest,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[Stage]:
    """The stage named by the test's parameter, on its own folders."""
    name = request.param

    def copied(variant: str, overflow: str = "none") -> Path:
        return shared_models.copied(model_folder(variant, overflow), tmp_path / "models" / variant)

    kept = tmp_path / "kept"
    if name == "hub":
        with running_hub(monkeypatch, tmp_path) as server:
            server.push(ID, files_of(model_folder()))
            yield download(Path(constants.HF_HUB_CACHE))
        return
    if name == "server":
        picture = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "a"}}
        noise = {"class_type": "Noise", "inputs": {"width": 32, "seed": 1, "kind": "uniform", "text": "cat"}}
        with FakeComfy() as elsewhere:
            yield server_download(elsewhere.url, {"1": noise, "2": picture}, tmp_path / "out")
        return
    make: dict[str, Callable[[], Stage]] = {
        "load": lambda: ModelStage(copied("cogview4"), "cogview4", "load", "transformer", kept),
        "encode text": lambda: ModelStage(copied("2b"), "2b", "encode", "text_encoder", kept),
        "encode image": lambda: ModelStage(copied("svd"), "svd", "sample", "image_encoder", kept),
        "sample": lambda: ModelStage(copied("cogview3", "inside"), "cogview3", "sample", "transformer", kept),
        "sample and learn": lambda: ModelStage(copied("svd", "inside"), "svd", "sample", "unet", kept),
        "decode": lambda: ModelStage(copied("cogview4"), "cogview4", "decode", "vae", kept),
        "save": lambda: saving(tmp_path / "out"),
    }
    yield make[name]()


def reference_run(stage: Stage) -> tuple[Any, int, dict[str, bytes]]:
    """(result, number of operations, files) of a run without faults, after a warm-up run."""
    stage.fresh()
    stage.run()
    stage.fresh()
    with Operations(stage.folders, torch=stage.torch) as operations:
        made = stage.run()
    left = tree(*stage.folders)
    stage.fresh()
    return made, operations.count, left


def _of_transformers(held: Any) -> bool:
    """Whether these are only hooks that transformers puts on each layer of a text encoder, or their flag."""
    hooks = [*held.values()] if isinstance(held, dict) else []
    return len(hooks) < 2 and all(
        getattr(hook, "__module__", "") == "transformers.utils.output_capturing" for hook in hooks
    )


def marks(stage: Stage) -> list[str]:
    """What a run left on loaded modules: hooks, patches, meta tensors, gradients."""
    if not isinstance(stage, ModelStage) or stage.generation is None:
        return []
    found = []
    for component, loaded in stage.generation.handle.store.components.items():
        for name, part in loaded.module.named_modules():
            hooks = [key for key, held in vars(part).items() if "hooks" in key and not _of_transformers(held)]
            patched = [key for key in ("forward", "__call__", "to") if key in vars(part)]
            odd = [
                key for key, tensor in part.named_parameters(recurse=False) if tensor.is_meta or tensor.requires_grad
            ]
            if hooks or patched or odd or part.training:
                found.append(f"{component}.{name}: {hooks} {patched} {odd}")
    return found


@pytest.mark.parametrize(
    ("stage", "fault"),
    [(s, f) for f in ERRORS for s in STAGES if f != "out of memory" or s not in ("hub", "server")],
    indirect=["stage"],
)
def test_error_at_any_operation_leaves_nothing_behind(stage: Stage, fault: str) -> None:
    expected, operations, whole = reference_run(stage)
    assert operations > 1
    for error, at in product(ERRORS[fault], spread(operations, PLACES)):
        stage.fresh()
        before, state = tree(*stage.folders), process_state.read()
        raised = None
        with Operations(stage.folders, at, raising(error()), torch=stage.torch) as counted:
            try:
                stage.run()
            except BaseException as found:  # noqa: BLE001 - keep only its type: its frames hold tensors
                raised = type(found)
        assert counted.happened
        assert raised or error is not KeyboardInterrupt, "some errors are only reported; KeyboardInterrupt always stops"
        assert left_behind(stage, state) == []
        after = tree(*stage.folders)
        assert {path: after[path] for path in before if path in after} == before, "existing files are unchanged"
        written = {path for path in after if path not in before and after[path] not in whole.values()}
        if counted.happened == "os.remove":  # a file that could not be deleted
            written = {path for path in written if not unfinished_by_name(path)}
        assert written <= unfinished(stage)
        again = stage.run()
        assert same(again, expected), f"{error} at {at} of {operations}"
        left = {content for path, content in tree(*stage.folders).items() if not unfinished_by_name(path)}
        assert marks(stage) == [] and left == {*whole.values()}


def unfinished_by_name(path: str) -> bool:
    return Path(path).name.startswith(".") and path.endswith(".tmp")


def unfinished(stage: Stage) -> set[str]:
    """Partial files whose names mark them as unfinished."""
    cache = Path(constants.HF_HUB_CACHE)
    names = ("*.incomplete", "*.lock")
    return {str(file) for name in names for file in cache.rglob(name)} if cache in stage.folders else set()


@pytest.mark.parametrize("stage", STAGES, indirect=True)
def test_killed_process_leaves_no_partial_files(stage: Stage) -> None:
    """A later run on the same folders is right, and only unfinished names hold partial files."""
    expected, operations, whole = reference_run(stage)
    for at in spread(operations, PLACES):
        stage.fresh()
        before = tree(*stage.folders)
        killing = Operations(stage.folders, at, kill_this_process, torch=stage.torch)
        assert killed_in_a_child(stage.run, killing) == -signal.SIGKILL
        after = tree(*stage.folders)
        assert {path: after[path] for path in before if path in after} == before
        written = {path for path in after if path not in before and after[path] not in whole.values()}
        assert all(map(unfinished_by_name, written - unfinished(stage))), written
        assert same(stage.run(), expected), f"killed at {at} of {operations}"


@pytest.mark.parametrize("stage", STAGES, indirect=True)
def test_clock_jumps_do_not_change_the_result(stage: Stage) -> None:
    expected, _, whole = reference_run(stage)
    files = [Path(path) for path in tree(*stage.folders)]
    tomorrow = time.time() + 10 * 365 * 86400
    for file in files:
        os.utime(file, (tomorrow, tomorrow))
    stage.fresh()
    with jumping_clock():
        assert same(stage.run(), expected)
    assert tree(*stage.folders).keys() == whole.keys()
    if isinstance(stage, ModelStage) and stage.generation:
        steps = [step for report in stage.generation.reports.values() for step in report.steps]
        assert all(step.seconds >= 0 for step in steps)
    stage.fresh()
    assert same(stage.run(), expected)


def replace_file(file: Path, content: bytes) -> None:
    """Replace the file as downloads and copies do: open handles still read the old one."""
    other = file.with_suffix(".other")
    other.write_bytes(content)
    os.replace(other, file)


@pytest.mark.parametrize("stage", READING, indirect=True)
def test_truncated_weight_file_is_rejected(stage: ModelStage) -> None:
    expected, _, _ = reference_run(stage)
    content = stage.file.read_bytes()
    for left in (0, 7, 100, len(content) // 2, len(content) - 1):
        stage.fresh()
        state = process_state.read()
        replace_file(stage.file, content[:left])
        with pytest.raises(BadFolder):  # the pipeline was opened with the whole file
            stage.run()
        assert left_behind(stage, state) == []
        with pytest.raises(BadFolder, match="cannot be used: it has"):
            stage.fresh()
        replace_file(stage.file, content)
        stage.fresh()
        assert same(stage.run(), expected)


@pytest.mark.parametrize("stage", READING, indirect=True)
def test_header_with_flipped_bit_is_rejected_or_harmless(stage: ModelStage) -> None:
    """Rejected, or the same result. Only the header: weights have no checksum, so their bits are not checked."""
    expected, _, _ = reference_run(stage)
    content = stage.file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for place in spread(length, 4 * PLACES):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 7
        replace_file(stage.file, bytes(damaged))
        state = process_state.read()
        try:
            stage.fresh()
            assert same(stage.run(), expected), f"{bytes(content[place - 20 : place + 20])!r} at {place}"
        except (BadFolder, GuardStopped):
            refused += 1
        assert left_behind(stage, state) == []
    assert refused
    replace_file(stage.file, content)
    stage.fresh()
    assert same(stage.run(), expected)


@pytest.mark.parametrize("stage", READING, indirect=True)
def test_file_replaced_during_a_run_gives_old_or_new_result(stage: ModelStage) -> None:
    """A started run uses one of the two files entirely; later runs use the new one."""
    _, operations, _ = reference_run(stage)
    content = stage.file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    others = content[:length] + b"\0" * (len(content) - length)
    expected = outcome_with_content(stage, content)
    with_others = outcome_with_content(stage, others)
    assert not same(with_others, expected)
    for at in spread(operations, PLACES):
        replace_file(stage.file, content)
        stage.forget()
        stage.fresh()
        with Operations(stage.folders, at, lambda: replace_file(stage.file, others), torch=stage.torch) as counted:
            made = outcome(stage)
        assert counted.happened
        assert same(made, expected) or same(made, with_others), f"replaced at {at} of {operations}"
        assert marks(stage) == []
        assert same(outcome_with_content(stage, others), with_others)


def outcome_with_content(stage: ModelStage, content: bytes) -> Any:
    replace_file(stage.file, content)
    stage.forget()
    stage.fresh()
    return outcome(stage)


def outcome(stage: ModelStage) -> Any:
    """The result, or the class of an expected error."""
    try:
        return stage.run()
    except (BadFolder, GuardStopped) as error:
        return type(error)


@pytest.mark.parametrize("stage", ["sample and learn", "save", "server"], indirect=True)
def test_full_disk_leaves_no_partial_files(stage: Stage) -> None:
    reference_run(stage)
    if isinstance(stage, ModelStage):
        stage.forget()
        stage.fresh()
    expected = stage.run()
    folder = stage.folders[-1]
    shutil.rmtree(folder)
    stage.fresh()
    with full_disk(folder, free=4096) as real:
        (folder / "filler").write_bytes(b"0" * 4096 * real)
        held = tree(folder)
        error = OSError(errno.ENOSPC, "No space left on device")
        files = Operations([folder], -1 if real else 0, raising(error), torch=False)
        with files, suppress(OutputError):
            assert same(stage.run(), expected), "a full disk does not change the result"
        assert tree(folder) == held
    shutil.rmtree(folder)
    stage.fresh()
    assert same(stage.run(), expected)
