"""Make the wheels of torchvision and torchaudio importable beside a CPU build of torch.

PyPI's are built against CUDA. Beside a CPU build of torch their compiled halves do not load, and ComfyUI, which imports
both, needs neither.

- torchvision allows for that everywhere but in two lines: it registers shape functions for `nms` and `qnms` whether or
  not these operators exist, and the import dies with `operator torchvision::nms does not exist`. This puts the
  condition that the neighbouring lines have already before those two.
- torchaudio does without libraries that are not there, and dies of one that does not load: `Could not load this
  library`. This renames them.

Usage: PYTHON tests/comfyui/cpu_wheels.py, with the Python of the environment that is to be mended. Changes nothing
where both import already, or a second time; a wheel that is not installed is left to whoever needs it.
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


def register_what_is_there(torchvision: Path) -> None:
    file = torchvision / "_meta_registrations.py"
    replacement = file.with_suffix(".new")
    replacement.write_text(REGISTRATION.sub(GUARDED, file.read_text(encoding="utf-8")), encoding="utf-8")
    os.replace(replacement, file)


def rename_libraries(torchaudio: Path) -> None:
    for library in [file for pattern in LIBRARIES for file in (torchaudio / "lib").glob(pattern)]:
        library.replace(library.with_name(f"{library.name}.unused"))


MENDS: dict[str, tuple[str, Callable[[Path], None]]] = {  # wheel → what its import dies of, and what helps
    "torchvision": ("torchvision::nms does not exist", register_what_is_there),
    "torchaudio": ("Could not load this library", rename_libraries),
}


def import_error(name: str) -> str:
    """What importing it in a fresh process says, "" where that works."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def mend(name: str) -> str:
    """Why it still does not import, "" where it does or is not installed."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None or not (error := import_error(name)):
        return ""
    reason, help_it = MENDS[name]
    if reason not in error:
        return f"{name} does not import, and not for the reason that this script mends:\n{error}"
    help_it(Path(spec.origin).parent)
    if error := import_error(name):
        return f"{name} was changed, and still does not import:\n{error}"
    print(f"{name} runs without its compiled half in {sys.prefix}")
    return ""


if __name__ == "__main__":
    sys.exit("\n".join(filter(None, map(mend, MENDS))) or None)
