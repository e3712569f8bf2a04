"""Make torchvision's wheel importable beside a CPU build of torch.

PyPI's torchvision is built against CUDA. Beside a CPU build of torch its compiled half does not load, which torchvision
allows for everywhere but in two lines: it registers shape functions for `nms` and `qnms` whether or not these operators
exist, and the import dies with `operator torchvision::nms does not exist`. ComfyUI imports torchvision and calls
neither. This puts the condition that the neighbouring lines have already before those two.

Usage: PYTHON tests/comfyui/torchvision_cpu.py, with the Python of the environment that is to be mended. Changes nothing
where torchvision imports already, or a second time.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

REGISTRATION = re.compile(r"""^@(torch\.library\.register_fake\(["']torchvision::q?nms["']\))$""", re.MULTILINE)
GUARDED = r"@(\1 if torchvision.extension._has_ops() else lambda function: function)"


def import_error() -> str:
    """What importing torchvision in a fresh process says, '' where it works."""
    done = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else (done.stderr.strip() or f"exit code {done.returncode}")


def main() -> int:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        print(f"torchvision is not installed in {sys.prefix}: install it first, without its dependencies")
        return 1
    error = import_error()
    if not error:
        return 0
    if "torchvision::nms does not exist" not in error:
        print(f"torchvision does not import, and not for the reason that this script mends:\n{error}")
        return 1
    file = Path(spec.origin).with_name("_meta_registrations.py")
    text, count = REGISTRATION.subn(GUARDED, file.read_text(encoding="utf-8"))
    temporary = file.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
    error = import_error()
    if error:
        print(f"{count} lines of {file} changed, and torchvision still does not import:\n{error}")
        return 1
    print(f"torchvision runs without its compiled operators in {sys.prefix} ({count} lines changed)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
