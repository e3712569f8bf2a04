"""A ComfyUI checkout, started without a browser for one run and stopped after it.

The checkout is not changed: port, output, temp and user folders and the database belong to this run, and are removed
when it ends. Its models, inputs and custom nodes are used as they are. If this pack is not among its custom nodes, an
extra-paths file adds a temporary `custom_nodes` folder with a stub that loads the pack from its current folder. It is a
stub because links need rights on Windows and copies go stale.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...comfyui_host import host
from ..errors import HostError, RunFailedError, UnknownNodesError, WorkflowError
from ..files import temporary_folder
from ..server.follow import read_for_server, run_on_server
from ..workflow.graph import Graph
from ..workflow.schema import Schema
from . import process
from .result import RunResult

logger = logging.getLogger(__name__)

PACK = "comfyui-onediff-guard"
PACK_ROOT = Path(__file__).resolve().parents[2]
INTERPRETERS = (
    ".venv/bin/python",
    "venv/bin/python",
    ".venv/Scripts/python.exe",
    "venv/Scripts/python.exe",
    "../python_embeded/python.exe",  # the spelling of the portable Windows build
)
START_SECONDS = 300.0  # many custom nodes on a slow disk take minutes
ALIVE_SECONDS = 0.25
PATIENCE_SECONDS = 10.0  # a ComfyUI that we started does not come back once it is gone
LOG_LINES = 25  # last lines of the log in messages
OPTIONAL_FLAGS = (["--database-url", "sqlite:///:memory:"], ["--disable-api-nodes"], ["--disable-auto-launch"])
ACCELERATOR_PROBE = (
    "import torch; print(torch.cuda.is_available() or torch.backends.mps.is_available() or (hasattr(torch, 'xpu') and "
    "torch.xpu.is_available()))"
)
STUB = """\
import importlib.util
import sys

ROOT = {root!r}
spec = importlib.util.spec_from_file_location({name!r}, ROOT + "/__init__.py", submodule_search_locations=[ROOT])
pack = sys.modules[{name!r}] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
NODE_CLASS_MAPPINGS = pack.NODE_CLASS_MAPPINGS
NODE_DISPLAY_NAME_MAPPINGS = pack.NODE_DISPLAY_NAME_MAPPINGS
"""


@dataclass(frozen=True)
class Running:
    url: str
    log: Path
    input_dir: Path  # the input folder of its nodes

    def read(self, workflow: Graph | Mapping[str, Any], **options: Any) -> tuple[Graph, dict[str, Schema]]:
        """Call `read_for_server`; errors include the end of the log."""
        with self._log_told():
            return read_for_server(workflow, url=self.url, **options)

    def run(self, workflow: Graph | Mapping[str, Any], **options: Any) -> RunResult:
        """Call `run_on_server`; errors include the end of the log."""
        with self._log_told():
            return run_on_server(
                workflow, url=self.url, reads_from=self.input_dir, patience=PATIENCE_SECONDS, **options
            )

    @contextmanager
    def _log_told(self) -> Iterator[None]:
        try:
            yield
        except (UnknownNodesError, HostError, RunFailedError) as error:
            error.args = (f"{error}\nThe end of ComfyUI's log:\n{_tail(self.log)}",)
            raise


@contextmanager
def started(checkout: Path, *, models: Sequence[Path] = (), input_dir: Path | None = None) -> Iterator[Running]:
    """Run a ComfyUI on a free port of 127.0.0.1 while the context lasts.

    `COMFYUI_PYTHON` names its interpreter, `COMFYUI_ARGS` further arguments for its main.py. `--cpu` is added if torch
    finds no accelerator.

    models: further folders with models, besides the checkout's own. Raises WorkflowError if the folder contains no
    ComfyUI, or `COMFYUI_PYTHON` names no file; HostError if ComfyUI ended or did not answer in time.
    """
    checkout = checkout.resolve()
    for needed in ("main.py", "comfy/cli_args.py"):
        if not (checkout / needed).is_file():
            raise WorkflowError(f"--comfyui {checkout}: it has no {needed}. Give the folder of a ComfyUI checkout.")
    python = find_interpreter(checkout)
    with temporary_folder("onediff-guard-") as folder:
        log = folder / "comfyui.log"
        port = _free_port()
        command = [python, *_arguments(checkout, folder, port, models, input_dir)]
        if not _has_accelerator(python):
            command.append("--cpu")
        logger.info("Starting %s", shlex.join(command))
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with process.running(command, cwd=checkout, log=log, env=environment) as child:
            _wait_until_up(child, port, log)
            yield Running(f"http://127.0.0.1:{port}", log, input_dir or checkout / "input")


def find_interpreter(checkout: Path) -> str:
    """Return `COMFYUI_PYTHON`, else the Python of the checkout's virtual environment, else this Python. Raises
    WorkflowError if `COMFYUI_PYTHON` names no file."""
    named = os.environ.get("COMFYUI_PYTHON")
    if named:
        if not Path(named).is_file():
            raise WorkflowError(f"COMFYUI_PYTHON is {named}, but there is no such file.")
        return named
    own = (checkout / place for place in INTERPRETERS)
    return next((str(path) for path in own if path.is_file()), sys.executable)


def has_pack(checkout: Path) -> bool:
    """Return whether this pack is one of the checkout's enabled custom nodes."""
    for project in (checkout / "custom_nodes").glob("*/pyproject.toml"):
        text = project.read_text(encoding="utf-8", errors="replace")
        ours = re.search(rf'^name\s*=\s*["\']{PACK}["\']', text, re.MULTILINE | re.IGNORECASE)
        if ours and not project.parent.name.endswith(".disabled"):
            return True
    return False


def _arguments(checkout: Path, folder: Path, port: int, models: Sequence[Path], input_dir: Path | None) -> list[str]:
    arguments = ["main.py", "--listen", "127.0.0.1", "--port", str(port)]
    for kind in ("output", "temp", "user"):
        (folder / kind).mkdir()
        arguments += [f"--{kind}-directory", str(folder / kind)]
    if input_dir is not None:
        arguments += ["--input-directory", str(input_dir.resolve())]
    paths = {}
    if not has_pack(checkout):
        paths["custom_nodes"] = str(_write_stub(folder / "custom_nodes"))
    for kind in host.MODEL_KINDS if models else ():
        paths[kind] = "\n".join(str(root.resolve()) for root in host.laid_out(models, kind))
    if paths:
        config = folder / "extra_model_paths.yaml"
        config.write_text(json.dumps({PACK: paths}), encoding="utf-8")  # JSON is YAML
        arguments += ["--extra-model-paths-config", str(config)]
    known = (checkout / "comfy" / "cli_args.py").read_text(encoding="utf-8", errors="replace")
    for flag, *value in OPTIONAL_FLAGS:
        arguments += [flag, *value] if f'"{flag}"' in known else []
    given = os.environ.get("COMFYUI_ARGS", "")
    try:
        return arguments + shlex.split(given, posix=os.name != "nt")
    except ValueError as error:
        raise WorkflowError(f"COMFYUI_ARGS is {given!r}: {error}. Close its quotes.") from None


def _write_stub(custom_nodes: Path) -> Path:
    stub = custom_nodes / PACK / "__init__.py"
    stub.parent.mkdir(parents=True)
    stub.write_text(STUB.format(root=PACK_ROOT.as_posix(), name=PACK.replace("-", "_")), encoding="utf-8")
    return custom_nodes


def _has_accelerator(python: str) -> bool:
    """Ask the interpreter itself: its torch may differ from ours. Raises HostError if it cannot import torch."""
    try:
        asked = subprocess.run([python, "-c", ACCELERATOR_PROBE], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or "").strip() or str(error)
        raise HostError(
            f"{python} cannot import torch ({said.splitlines()[-1]}), so ComfyUI cannot run with it. "
            "Set COMFYUI_PYTHON to the interpreter that ComfyUI is installed in."
        ) from None
    return asked.stdout.strip().endswith("True")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _wait_until_up(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until ComfyUI listens, which it does once its custom nodes are loaded. Raises HostError."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if child.poll() is not None:
            what = f"ended with code {child.returncode}"
        elif time.monotonic() > deadline:
            what = f"did not answer within {START_SECONDS:.0f} s"
        else:
            time.sleep(ALIVE_SECONDS)
            continue
        raise HostError(f"ComfyUI did not start: it {what}. The end of its log:\n{_tail(log)}")


def _tail(log: Path) -> str:
    with log.open(encoding="utf-8", errors="replace") as file:
        return "\n".join(f"  {line.rstrip()}" for line in deque(file, LOG_LINES)) or "  (empty)"
