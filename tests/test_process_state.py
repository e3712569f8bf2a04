"""The fixture around every test sees each kind of thing that a test can leave behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import process_state
import pytest
import torch
import torch._dynamo
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.precision.fp32_settings import EAGER_ONLY
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Undo = Callable[[], Any]


def variable() -> Undo:
    os.environ["LEFT_BEHIND"] = "1"
    return lambda: os.environ.pop("LEFT_BEHIND")


def working_directory() -> Undo:
    before = Path.cwd()
    os.chdir("/")
    return lambda: os.chdir(before)


def mask() -> Undo:
    before = os.umask(0o077)
    return lambda: os.umask(before)


def path() -> Undo:
    sys.path.append("/left")
    return sys.path.pop


def signal_handler() -> Undo:
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    return lambda: signal.signal(signal.SIGUSR1, before)


def level() -> Undo:
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(before + 1)
    return lambda: logger.setLevel(before)


def warning_filter() -> Undo:
    caught = warnings.catch_warnings()
    caught.__enter__()
    warnings.simplefilter("error", ResourceWarning)
    return lambda: caught.__exit__(None, None, None)


def thread(monkeypatch: pytest.MonkeyPatch) -> Undo:
    monkeypatch.setattr(process_state, "ENDING_SECONDS", 0.01)
    done = threading.Event()
    started = threading.Thread(target=done.wait, name="left")
    started.start()
    return lambda: (done.set(), started.join())


def descriptor() -> Undo:
    return socket.socket().close


def default_dtype() -> Undo:
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(torch.float32)


def backend_flag() -> Undo:
    torch.backends.cudnn.benchmark = True
    return lambda: setattr(torch.backends.cudnn, "benchmark", False)


def default_device() -> Undo:
    torch.set_default_device("meta")
    return lambda: torch.set_default_device(None)


def gradients() -> Undo:
    torch.set_grad_enabled(False)
    return lambda: torch.set_grad_enabled(True)


def entered(*contexts: Any) -> Undo:
    stack = ExitStack()
    for context in contexts:
        stack.enter_context(context)
    return stack.close


def patched(of: Any, name: str) -> Undo:
    before = getattr(of, name)
    setattr(of, name, lambda *_: None)
    return lambda: setattr(of, name, before)


def hook() -> Undo:
    return torch.nn.modules.module.register_module_forward_hook(lambda *_: None).remove


KINDS: dict[str, Callable[..., Undo]] = {
    "variable": variable,
    "interpreter working directory": working_directory,
    "interpreter umask": mask,
    "interpreter path": path,
    "signal": signal_handler,
    "logger torch": level,
    "warnings": warning_filter,
    "thread": thread,
    "descriptor socket": descriptor,
    "torch flag default dtype": default_dtype,
    "torch flag _get_cudnn_benchmark": backend_flag,
    "torch flag grad mode": gradients,
    "torch flag inference mode": lambda: entered(torch.inference_mode()),
    "torch flag autocast": lambda: entered(torch.autocast("cpu", torch.bfloat16)),
    "torch flag function modes": lambda: entered(TorchFunctionMode()),
    "torch flag default device": default_device,
    "torch flag dispatch modes": lambda: entered(TorchDispatchMode()),
    "torch flag functions can be overridden": lambda: entered(torch._C.DisableTorchFunction()),
    "torch name nn.Module.register_parameter": lambda: patched(torch.nn.Module, "register_parameter"),
    "torch name nn.init.normal_": lambda: patched(torch.nn.init, "normal_"),
    "torch name torch.empty": lambda: patched(torch, "empty"),
    "hooks": hook,
    "compiler": lambda: entered(torch._dynamo.config.patch(suppress_errors=True)),
    "compiler stance": lambda: entered(torch.compiler.set_stance("force_eager")),
    "pack": lambda: entered(EAGER_ONLY.held()),
    "pack folders of a run": lambda: entered(host.plain_folders(models=[], input=Path(), output=Path())),
}


@pytest.mark.parametrize(("kind", "leave"), KINDS.items(), ids=KINDS)
def test_what_is_left_behind_is_named(kind: str, leave: Callable[..., Undo], monkeypatch: pytest.MonkeyPatch) -> None:
    before = process_state.read()
    assert process_state.changes(before) == []
    undo = leave(monkeypatch) if leave is thread else leave()
    try:
        found = process_state.changes(before)
    finally:
        undo()
    assert [line for line in found if line.startswith(kind)], found
    assert process_state.changes(before) == []


def test_every_kind_is_tried() -> None:
    assert {kind for kind in process_state.KINDS for name in KINDS if name.startswith(kind)} == {*process_state.KINDS}


def run_of(root: Path, folder: Path, test: str) -> tuple[int, str]:
    """Its exit code, and what it told."""
    (folder / "test_it.py").write_text(test)
    options = ["-q", "-p", "no:cacheprovider", "-p", "conftest", "--rootdir", folder, "-c", root / "pyproject.toml"]
    command = [sys.executable, "-m", "pytest", *map(str, options), str(folder)]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root / "tests"), str(root / "tests" / "support")))}
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=False, cwd=folder)
    return done.returncode, done.stdout


def test_a_test_that_leaves_something_fails(root: Path, tmp_path: Path) -> None:
    leaves = "import os\ndef test_left(): os.environ['LEFT_BEHIND'] = '1'\n"
    code, told = run_of(root, tmp_path, f"{leaves}def test_next(): assert os.environ['LEFT_BEHIND']\n")
    assert code == 1 and "variable LEFT_BEHIND: absent → 1" in told and "2 passed, 1 error" in told, told


def test_a_run_fails_whose_tests_change_a_model_that_they_share(root: Path, tmp_path: Path) -> None:
    builds = "import shared_models\ndef test_it():\n    folder = shared_models.built(lambda path: path.mkdir())\n"
    code, told = run_of(root, tmp_path, f"{builds}    (folder / 'new').touch()\n")
    assert code == 1 and "1 passed" in told and "though all tests share it: " in told, told


def test_what_libraries_do_when_they_are_first_imported_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    before, modules = process_state.read(), [*sys.modules]
    undo = warning_filter()
    try:
        assert process_state.left_behind(before, modules)
        monkeypatch.setitem(sys.modules, "a_library", sys)
        assert not process_state.left_behind(before, modules)
        torch.set_default_dtype(torch.float64)
        assert "torch flag default dtype" in process_state.left_behind(before, modules)[0]
    finally:
        torch.set_default_dtype(torch.float32)
        undo()
