"""The three hosts of a headless run: this process, a running ComfyUI, a checkout that is started for it."""

from __future__ import annotations

from .checkout import run_in_checkout
from .follow import run_on_server
from .graph import Graph, from_api, read_json
from .local import run_local
from .result import Progress, RunResult
from .settings import Setting

__all__ = [
    "Graph",
    "Progress",
    "RunResult",
    "Setting",
    "from_api",
    "read_json",
    "run_in_checkout",
    "run_local",
    "run_on_server",
]
