"""Every fault in every stage: nothing is half-written, nothing stays behind, and the next run is right by bits.

Files and disks that fail a download are in tests/pipelines/test_hub.py and tests/headless/test_server_client.py.
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
from fake_comfy import FakeComfy
from faulty_stages import ModelStage, Stage, download, same, saving, server_download
from hub_files import ID, files_of
from hub_server import running_hub
from huggingface_hub import constants
from operations import Operations, full_disk, jumping_clock, kill_this_process, killed_in_a_child, raising, spread, tree
from tiers import drawn

PLACES = drawn(24, 3)  # operations of a stage, from its first to its last, at which a fault comes


class Broken(Exception):
    """What nobody expects."""


class InterruptProcessingException(Exception):
    """As ComfyUI's, by its name."""


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
def _told(figure: Callable[[str, object], None]) -> None:
    figure(f"{PLACES} places of a stage: partial files, leftovers and wrong next runs", 0)


@pytest.fixture
def stage(
    request: pytest.FixtureRequest,
    model_folder: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Generator[Stage]:
    """The one that the test's parameter names, on folders of its own."""
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


def undisturbed(stage: Stage) -> tuple[Any, int, dict[str, bytes]]:
    """What it makes, in how many operations, and what is in its folders then. Also after imports and first uses."""
    stage.fresh()
    stage.run()
    stage.fresh()
    with Operations(stage.folders, torch=stage.torch) as operations:
        made = stage.run()
    left = tree(*stage.folders)
    stage.fresh()
    return made, operations.count, left


def _of_transformers(held: Any) -> bool:
    """Whether hooks are nothing but those that a text encoder has from the start, one on each layer, or their flag."""
    hooks = [*held.values()] if isinstance(held, dict) else []
    return len(hooks) < 2 and all(
        getattr(hook, "__module__", "") == "transformers.utils.output_capturing" for hook in hooks
    )


def marks(stage: Stage) -> list[str]:
    """What a run has left on modules that are loaded."""
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
def test_an_error_anywhere(stage: Stage, fault: str) -> None:
    expected, operations, whole = undisturbed(stage)
    assert operations > 1
    for error, at in product(ERRORS[fault], spread(operations, PLACES)):
        stage.fresh()
        before, state = tree(*stage.folders), process_state.read()
        raised = None
        with Operations(stage.folders, at, raising(error()), torch=stage.torch) as counted:
            try:
                stage.run()
            except BaseException as found:  # noqa: BLE001 - which keeps what it was raised in alive
                raised = type(found)
        assert counted.happened
        assert raised or error is not KeyboardInterrupt, "some errors are lines in the report; who stops is obeyed"
        assert left_behind(stage, state) == []
        after = tree(*stage.folders)
        assert {path: after[path] for path in before if path in after} == before, "what was there stays as it was"
        written = {path for path in after if path not in before and after[path] not in whole.values()}
        if counted.happened == "os.remove":  # it is what could not be deleted
            written = {path for path in written if not unfinished_by_name(path)}
        assert written <= unfinished(stage)
        again = stage.run()
        assert same(again, expected), f"{error} at {at} of {operations}"
        left = {content for path, content in tree(*stage.folders).items() if not unfinished_by_name(path)}
        assert marks(stage) == [] and left == {*whole.values()}


def unfinished_by_name(path: str) -> bool:
    return Path(path).name.startswith(".") and path.endswith(".tmp")


def unfinished(stage: Stage) -> set[str]:
    """What may be there in part, and its name says so."""
    cache = Path(constants.HF_HUB_CACHE)
    names = ("*.incomplete", "*.lock")
    return {str(file) for name in names for file in cache.rglob(name)} if cache in stage.folders else set()


@pytest.mark.parametrize("stage", STAGES, indirect=True)
def test_a_killed_process(stage: Stage) -> None:
    """Another process on the same folders is right, and finds no half of a file under a name that counts."""
    expected, operations, whole = undisturbed(stage)
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
def test_a_clock_that_jumps(stage: Stage) -> None:
    expected, _, whole = undisturbed(stage)
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


def rewritten(file: Path, content: bytes) -> None:
    """In place of the file, as downloads and copies do it: who has it open reads on in the old one."""
    other = file.with_suffix(".other")
    other.write_bytes(content)
    os.replace(other, file)


@pytest.mark.parametrize("stage", READING, indirect=True)
def test_a_file_that_was_truncated(stage: ModelStage) -> None:
    expected, _, _ = undisturbed(stage)
    content = stage.file.read_bytes()
    for left in (0, 7, 100, len(content) // 2, len(content) - 1):
        stage.fresh()
        state = process_state.read()
        rewritten(stage.file, content[:left])
        with pytest.raises(BadFolder):  # it was whole when the pipeline was opened
            stage.run()
        assert left_behind(stage, state) == []
        with pytest.raises(BadFolder, match="cannot be used: it has"):
            stage.fresh()
        rewritten(stage.file, content)
        stage.fresh()
        assert same(stage.run(), expected)


@pytest.mark.parametrize("stage", READING, indirect=True)
def test_a_bit_that_flipped_in_a_header(stage: ModelStage) -> None:
    """Refused, or what was meant all the same. Weights have no checksum on disk: a bit of theirs is the model's."""
    expected, _, _ = undisturbed(stage)
    content = stage.file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for place in spread(length, 4 * PLACES):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 7
        rewritten(stage.file, bytes(damaged))
        state = process_state.read()
        try:
            stage.fresh()
            assert same(stage.run(), expected), f"{bytes(content[place - 20 : place + 20])!r} at {place}"
        except (BadFolder, GuardStopped):
            refused += 1
        assert left_behind(stage, state) == []
    assert refused
    rewritten(stage.file, content)
    stage.fresh()
    assert same(stage.run(), expected)


@pytest.mark.parametrize("stage", READING, indirect=True)
def test_a_file_that_is_replaced_meanwhile(stage: ModelStage) -> None:
    """What was begun ends with the one file or with the other, whole; what begins afterwards has the new one."""
    _, operations, _ = undisturbed(stage)
    content = stage.file.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    others = content[:length] + b"\0" * (len(content) - length)
    expected = started_with(stage, content)
    with_others = started_with(stage, others)
    assert not same(with_others, expected)
    for at in spread(operations, PLACES):
        rewritten(stage.file, content)
        stage.forget()
        stage.fresh()
        with Operations(stage.folders, at, lambda: rewritten(stage.file, others), torch=stage.torch) as counted:
            made = outcome(stage)
        assert counted.happened
        assert same(made, expected) or same(made, with_others), f"replaced at {at} of {operations}"
        assert marks(stage) == []
        assert same(started_with(stage, others), with_others)


def started_with(stage: ModelStage, content: bytes) -> Any:
    rewritten(stage.file, content)
    stage.forget()
    stage.fresh()
    return outcome(stage)


def outcome(stage: ModelStage) -> Any:
    """What it makes; of an error that is ours, its kind."""
    try:
        return stage.run()
    except (BadFolder, GuardStopped) as error:
        return type(error)


@pytest.mark.parametrize("stage", ["sample and learn", "save", "server"], indirect=True)
def test_a_disk_that_is_full(stage: Stage) -> None:
    undisturbed(stage)
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
            assert same(stage.run(), expected), "what cannot be kept does no harm to what is made"
        assert tree(folder) == held
    shutil.rmtree(folder)
    stage.fresh()
    assert same(stage.run(), expected)
