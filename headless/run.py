"""The three hosts of a headless run: this process, a running ComfyUI, a checkout that is started for it."""

from __future__ import annotations

from .hosts.checkout import run_in_checkout
from .hosts.local import run_local
from .hosts.result import Progress, RunResult
from .server.follow import run_on_server
from .workflow.graph import Graph, from_api, read_json
from .workflow.settings import Setting

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
