"""A fake ComfyUI checkout: main.py only answers requests, and its child process ignores SIGTERM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MAIN = """\
import json, os, signal, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if Path("busy").exists():
            Path("asked").touch()
            time.sleep(600)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, signal.SIG_DFL)
Path("seen.json").write_text(json.dumps({"argv": sys.argv, "pids": [os.getpid(), os.getppid(), child.pid]}))
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def write_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a file "busy" it never answers; it creates a file "asked" at the first request."""
    for variable in ("COMFYUI_PYTHON", "COMFYUI_ARGS"):
        monkeypatch.delenv(variable, raising=False)
    (folder / "main.py").write_text(MAIN)
    (folder / "comfy").mkdir()
    (folder / "comfy" / "cli_args.py").write_text('add_argument("--database-url")')
    return folder


def is_running(pid: int) -> bool:
    if sys.platform == "win32":
        listed = subprocess.run(["tasklist", "/FI", f"PID eq {pid}"], capture_output=True, text=True, check=True)
        return str(pid) in listed.stdout
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return state.stdout.strip() not in ("", "Z")
