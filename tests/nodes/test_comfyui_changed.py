"""If a ComfyUI lacks or changes a function, the feature is switched off and logged once; other errors are raised.

tests/comfyui/test_surface_in_comfyui.py tries each name in real ComfyUIs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import comfyui_surface as surface
import pytest
import torch
from comfyui_onediff_guard.comfyui_host import compat, every_workflow, host, placement
from comfyui_onediff_guard.trust.message import BadInput
from fake_comfy import InterruptProcessingException


@pytest.fixture(autouse=True)
def _nothing_logged() -> Iterator[None]:
    compat.tell_once.cache_clear()
    yield
    compat.tell_once.cache_clear()


# --- the table --------------------------------------------------------------------------------------------------------


def test_table_has_all_names_that_code_uses_and_no_others() -> None:
    assert not surface.used().keys() - surface.USES.keys()
    assert not surface.modules() - {surface.module_of(name) for name in surface.USES} - {"comfy.cmd.folder_paths"}
    assert not [name for name, files in surface.files().items() if not files]


def test_surface_page_is_up_to_date() -> None:
    """If it fails: run `python scripts/comfyui_surface.py`, with --read for each ComfyUI if the table has new names."""
    assert surface.PAGE.read_text(encoding="utf-8") == surface.render()


# --- what counts as a change ------------------------------------------------------------------------------------------


def extra_argument(_text: str, _node: str, *, new: int) -> None:
    del new


def raises_type_error(*_: Any) -> None:
    raise TypeError("ComfyUI's own")


def raises_attribute_error(*_: Any) -> None:
    SimpleNamespace().missing()


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    "server", [SimpleNamespace(), SimpleNamespace(send_progress_text=extra_argument, client_id="page")]
)
def test_missing_or_changed_function_is_logged_once(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host, "server", lambda: server)
    for _ in range(2):
        host.say("7", "a text")
    (message,) = caplog.messages
    assert message.startswith("Off: texts on nodes; this version of ComfyUI is not supported")


@pytest.mark.parametrize(
    ("function", "error"),
    [(raises_type_error, TypeError), (raises_attribute_error, AttributeError), (out_of_memory, torch.OutOfMemoryError)],
)
def test_error_inside_comfyui_is_raised(
    function: Callable[..., None], error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "server", lambda: SimpleNamespace(send_progress_text=function, client_id="page"))
    with pytest.raises(error):
        host.say("7", "a text")


def test_error_with_lost_state_is_raised() -> None:
    """The run must not continue as if nothing had happened."""

    @compat.unless_changed("loading", False, kinds=(TypeError,))
    def loads() -> None:
        error = TypeError("an argument is missing")
        error.lost = "weights"  # pyright: ignore[reportAttributeAccessIssue]
        raise error

    with pytest.raises(TypeError):
        loads()


def test_own_errors_do_not_count_as_change() -> None:
    assert not compat.what_changed(BadInput("not wired"))
    assert compat.what_changed(compat.NotInComfyUI("not there")) == "not there"


@pytest.mark.parametrize(
    ("version", "missed"), {"0.3.64": False, "0.33.0": True, "of an unknown version": False}.items()
)
def test_names_that_older_release_never_had_are_not_missed(
    version: str, missed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "version", lambda: version)
    with pytest.raises(compat.NotInComfyUI, match=r"no longer has 'comfy[.]ops[.]x'") if missed else nullcontext():
        host.check_absence("comfy.ops.x", since=(0, 33))


# --- what works without it --------------------------------------------------------------------------------------------


def test_prompt_handler_accepts_extra_arguments() -> None:
    data = {"extra_data": {every_workflow.KEY: False}}
    assert every_workflow.on_prompt(data, 1, new=2) == data


MANAGEMENT = ("soft_empty_cache", "load_models_gpu", "free_memory", "minimum_inference_memory", "current_loaded_models")


@pytest.mark.parametrize("changed", [False, True])
def test_components_move_without_comfyuis_memory_manager(changed: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its functions are missing, or take one more argument and call a method that our stand-in for its models
    lacks."""
    functions = dict.fromkeys(MANAGEMENT, extra_argument) if changed else {}
    if changed:
        functions["load_models_gpu"] = lambda models, memory_required: models[0].new_in_comfyui()
    management = SimpleNamespace(get_torch_device=lambda: torch.device("cpu"), **functions)
    module = torch.nn.Linear(2, 2)
    place = placement.ComfyPlacement(management)
    for move in (lambda: place.make_room(1), lambda: place.to_device("vae", module), lambda: place.forget("vae")):
        move()
    place.to_host("vae", module)
    assert place.memory() is None and {weight.device.type for weight in module.parameters()} == {"cpu"}
    assert caplog.messages and all(text.startswith("Off: ComfyUI's memory manager") for text in caplog.messages)


def test_comfyui_without_device_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "folder_paths", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "comfy.model_management", SimpleNamespace())
    assert type(host.placement()).__name__ == "PlainPlacement"
    assert not list(host.weight_files("loras")) and not host.model_folders()


def test_interrupts_are_distinguished_from_errors() -> None:
    assert host.is_interrupt(InterruptProcessingException()) and not host.is_interrupt(ValueError())
