"""`python -m comfyui_onediff_guard.headless` is `onediff-guard` without its demo."""

from __future__ import annotations

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
