"""Starting and stopping a ComfyUI checkout, with a stand-in main.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from comfyui_onediff_guard.headless.errors import HostError, WorkflowError
from comfyui_onediff_guard.headless.hosts import checkout
from stand_in_checkout import is_running, write_checkout
from waiting import wait_until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose main.py only answers requests."""
    monkeypatch.setattr(checkout, "_has_accelerator", lambda python: False)
    return write_checkout(tmp_path, monkeypatch)


def test_checkout_starts_and_its_process_tree_is_stopped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_ARGS", "--extra 1")
    with checkout.started(folder, models=[folder / "m"], input_dir=folder / "in") as running:
        assert urlopen(running.url + "/queue").status == 200
        seen = json.loads((folder / "seen.json").read_text())
        argv = seen["argv"]
        config = json.loads(Path(argv[argv.index("--extra-model-paths-config") + 1]).read_text())
        assert config[checkout.PACK]["diffusers"] == str((folder / "m").resolve())
        temporary = running.log.parent
        assert Path(config[checkout.PACK]["custom_nodes"]).is_relative_to(temporary)
    assert argv[argv.index("--listen") + 1] == "127.0.0.1"
    assert argv[argv.index("--input-directory") + 1] == str((folder / "in").resolve())
    assert {"--database-url", "--cpu", "--extra"} <= set(argv)
    assert "--disable-api-nodes" not in argv, "unknown to older versions of ComfyUI"
    for pid in seen["pids"]:
        wait_until(lambda pid=pid: not is_running(pid), "a process outlives the checkout that started it")
    assert not temporary.exists()


def test_checkout_is_stopped_when_run_raises(folder: Path) -> None:
    seen: list[checkout.Running] = []

    def interrupted_run() -> None:
        with checkout.started(folder) as running:
            seen.append(running)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_run()
    with pytest.raises(URLError):
        urlopen(seen[0].url + "/queue", timeout=2)


def test_checkout_that_never_answers_fails_with_end_of_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tail_of_nonempty(log: Path, tail: Callable[[Path], str] = checkout._tail) -> str:
        wait_until(lambda: log.stat().st_size, "its log")
        return tail(log)

    monkeypatch.setattr(checkout, "START_SECONDS", 0.5)
    monkeypatch.setattr(checkout, "_tail", tail_of_nonempty)
    (folder / "main.py").write_text("import time; print('thinking', flush=True); time.sleep(60)")
    with pytest.raises(HostError, match=r"(?s)did not answer within.*thinking"), checkout.started(folder):
        pytest.fail("it started")


FAILS = "raise SystemExit('no module named sun')"


@pytest.mark.parametrize(
    ("files", "variables", "error", "message"),
    [
        ({"main.py": FAILS}, {}, HostError, r"(?s)did not start: it ended with code 1.*no module named sun"),
        ({}, {"COMFYUI_PYTHON": "main.py"}, HostError, r"(?s)ended with code 127.*cannot be run"),  # not a program
        ({}, {"COMFYUI_ARGS": "--extra 'x"}, WorkflowError, r"COMFYUI_ARGS.*No closing quotation"),
        ({"main.py": None}, {}, WorkflowError, "it has no main.py"),
        ({"comfy/cli_args.py": None}, {}, WorkflowError, "it has no comfy/cli_args.py"),
    ],
)
def test_checkout_that_cannot_start_reports_reason(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str | None],
    variables: dict[str, str],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    for name, text in files.items():
        Path(name).write_text(text) if text else Path(name).unlink()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message), checkout.started(folder):
        pytest.fail("it started")


@pytest.mark.parametrize("place", [".venv/bin/python", "venv/Scripts/python.exe"])
def test_interpreter_is_taken_from_variable_or_venv(folder: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkout.find_interpreter(folder) == sys.executable
    (folder / place).parent.mkdir(parents=True)
    (folder / place).touch()
    assert checkout.find_interpreter(folder) == str(folder / place)
    monkeypatch.setenv("COMFYUI_PYTHON", sys.executable)
    assert checkout.find_interpreter(folder) == sys.executable
    monkeypatch.setenv("COMFYUI_PYTHON", str(folder / "none"))
    with pytest.raises(WorkflowError, match="COMFYUI_PYTHON"):
        checkout.find_interpreter(folder)


@pytest.mark.parametrize(
    ("name", "project", "found"),
    [
        ("guard", 'name = "comfyui-onediff-guard"', True),
        ("guard.disabled", 'name = "comfyui-onediff-guard"', False),
        ("other", 'name = "comfyui-other"', False),
        ("empty", None, False),
    ],
)
def test_installed_pack_is_detected(tmp_path: Path, name: str, project: str | None, found: bool) -> None:
    pack = tmp_path / "custom_nodes" / name
    pack.mkdir(parents=True)
    if project:
        (pack / "pyproject.toml").write_text(f"[project]\n{project}\n")
    assert checkout.has_pack(tmp_path) is found


def test_stub_exports_pack_nodes(tmp_path: Path) -> None:
    stub = checkout._write_stub(tmp_path / "custom_nodes") / checkout.PACK / "__init__.py"
    code = f"import runpy; print(sorted(runpy.run_path({str(stub)!r})['NODE_CLASS_MAPPINGS']))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert "OneDiffGuardSampleCogVideoX" in done.stdout


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in for the interpreter")
@pytest.mark.parametrize(("rights", "reason"), [(0o755, "no torch here"), (0o644, "Permission denied")])
def test_interpreter_that_cannot_import_torch_is_rejected(tmp_path: Path, rights: int, reason: str) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho no torch here >&2\nexit 1\n")
    fake.chmod(rights)
    with pytest.raises(HostError, match=rf"cannot import torch \(.*{reason}.*COMFYUI_PYTHON"):
        checkout._has_accelerator(str(fake))
