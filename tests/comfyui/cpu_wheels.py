"""Make the wheels of torchvision and torchaudio importable with a CPU build of torch.

PyPI's wheels are built for CUDA. With a CPU build of torch, their compiled libraries do not load. ComfyUI imports both
packages, but does not need these libraries.

- torchvision handles this except in two lines: it registers shape functions for `nms` and `qnms` even if these
  operators do not exist, and the import fails with `operator torchvision::nms does not exist`. This script adds the
  condition that the neighbouring lines already have.
- torchaudio works without its libraries, but fails if one exists and does not load: `Could not load this library`.
  This script renames them.

Usage: PYTHON tests/comfyui/cpu_wheels.py, with the Python of the environment to fix. The script changes nothing if both
already import, or on a second run. It does not install missing wheels.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REGISTRATION = re.compile(r"""^@(torch\.library\.register_fake\(["']torchvision::q?nms["']\))$""", re.MULTILINE)
GUARDED = r"@(\1 if torchvision.extension._has_ops() else lambda function: function)"
LIBRARIES = ("*.so", "*.pyd")


def register_existing_operators(torchvision: Path) -> None:
    file = torchvision / "_meta_registrations.py"
    replacement = file.with_suffix(".new")
    replacement.write_text(REGISTRATION.sub(GUARDED, file.read_text(encoding="utf-8")), encoding="utf-8")
    os.replace(replacement, file)


def rename_libraries(torchaudio: Path) -> None:
    for library in [file for pattern in LIBRARIES for file in (torchaudio / "lib").glob(pattern)]:
        library.replace(library.with_name(f"{library.name}.unused"))


FIXES: dict[str, tuple[str, Callable[[Path], None]]] = {  # wheel → its import error, and the fix
    "torchvision": ("torchvision::nms does not exist", register_existing_operators),
    "torchaudio": ("Could not load this library", rename_libraries),
}


def import_error(name: str) -> str:
    """Return the error of importing the package in a new process; "" if it imports."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def fix(name: str) -> str:
    """Fix one wheel, and return why it still does not import; "" if it does, or is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not (error := import_error(name)):
        return ""
    reason, apply_fix = FIXES[name]
    if reason not in error:
        return f"{name} does not import, for a reason that this script does not fix:\n{error}"
    apply_fix(Path(spec.origin).parent)
    if error := import_error(name):
        return f"{name} was changed, and still does not import:\n{error}"
    print(f"{name} runs without its compiled libraries in {sys.prefix}")
    return ""


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(fix, FIXES))) or None)
