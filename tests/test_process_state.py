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
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import process_state
import pytest
import torch
import torch._dynamo
from comfyui_onediff_guard.comfyui_host import host
from comfyui_onediff_guard.precision.upcast import EAGER_ONLY
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def thread(patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    patch.setattr(process_state, "ENDING_SECONDS", 0.01)
    done = threading.Event()
    started = threading.Thread(target=done.wait, name="left")
    started.start()
    stack.callback(started.join)
    stack.callback(done.set)


def warning_filter(_patch: pytest.MonkeyPatch, stack: ExitStack) -> None:
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("error", ResourceWarning)


def after(change: Callable[[Any], Any], value: Any, before: Any) -> Leave:
    return lambda _patch, stack: (stack.callback(change, before), change(value))


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Leave:
    return lambda _patch, stack: stack.enter_context(context())


def replaced(of: Any, name: str, value: Any = None) -> Leave:
    return lambda patch, _stack: patch.setattr(of, name, value)


Leave = Callable[[pytest.MonkeyPatch, ExitStack], object]
KINDS: dict[str, Leave] = {
    "variable": lambda patch, _: patch.setenv("LEFT_BEHIND", "1"),
    "interpreter working directory": lambda patch, _: patch.chdir("/"),
    "signal": lambda _, stack: stack.callback(
        signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: None)
    ),
    "logger torch": replaced(logging.getLogger("torch"), "level", 1),
    "warnings": warning_filter,
    "thread": thread,
    "descriptor socket": inside(socket.socket),
    "torch flag default dtype": after(torch.set_default_dtype, torch.float64, torch.float32),
    "torch flag _get_cudnn_benchmark": after(partial(setattr, torch.backends.cudnn, "benchmark"), True, False),
    "torch flag grad mode": after(torch.set_grad_enabled, False, True),
    "torch flag inference mode": inside(torch.inference_mode),
    "torch flag autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "torch flag function modes": inside(TorchFunctionMode),
    "torch flag default device": after(torch.set_default_device, "meta", None),
    "torch flag dispatch modes": inside(TorchDispatchMode),
    "torch flag functions can be overridden": inside(torch._C.DisableTorchFunction),
    "torch name nn.Module.register_parameter": replaced(torch.nn.Module, "register_parameter"),
    "torch name nn.init.normal_": replaced(torch.nn.init, "normal_"),
    "torch name torch.empty": replaced(torch, "empty"),
    "hooks": lambda _, stack: stack.callback(register_module_forward_hook(lambda *_: None).remove),
    "compiler": inside(lambda: torch._dynamo.config.patch(suppress_errors=True)),
    "compiler stance": inside(lambda: torch.compiler.set_stance("force_eager")),
    "pack": inside(EAGER_ONLY.held),
    "pack folders of a run": inside(lambda: host.plain_folders(models=[], input=Path(), output=Path())),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_behind_is_named(kind: str) -> None:
    before = process_state.read()
    assert process_state.changes(before) == []
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        KINDS[kind](patch, stack)
        found = process_state.changes(before)
    assert [line for line in found if line.startswith(kind)], found
    assert process_state.changes(before) == []


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
