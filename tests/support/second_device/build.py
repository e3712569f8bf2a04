"""Build the second device's extension, once per machine, PyTorch version and source, in a cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "device.h", "hooks.h", "order.h")
NAME = "second_device_extension"
TORCH = "2.13"  # it depends on PyTorch's internal headers


def why_not() -> str:
    """Why it cannot be built here; "" if it can."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return f"PyTorch {torch.__version__} has CUDA of its own: the second device takes its place in the CPU build"
    if not torch.__version__.startswith(TORCH):
        return f"the second device is written for PyTorch {TORCH}, and this is {torch.__version__}"
    if not (shutil.which("g++") or shutil.which(os.environ.get("CXX", ""))):
        return "there is no C++ compiler (g++) to build the second device with"
    return ""


def extension() -> Any:
    """Load the extension module, building it first if needed."""
    from filelock import FileLock

    text = "".join((HERE / name).read_text(encoding="utf-8") for name in SOURCES)
    key = hashlib.sha256(f"{torch.__version__} {sys.version} {text}".encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "comfyui-onediff-guard-tests" / key
    library = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not library.exists():
            _build(library)
    spec = spec_from_file_location(NAME, library)
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(library: Path) -> None:
    from torch.utils import cpp_extension

    folders = [f"-isystem{folder}" for folder in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    names = ["c10", "torch_cpu", "torch", "torch_python"]
    linked = [f"-L{folder}" for folder in cpp_extension.library_paths()] + [f"-l{name}" for name in names]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        flags = ["-std=c++20", "-O1", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={NAME}"]
        command = [os.environ.get("CXX", "g++"), *flags, *folders, str(HERE / SOURCES[0]), "-o", str(made), *linked]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the second device does not build: {done.stderr[:2000]}")
        made.replace(library)
