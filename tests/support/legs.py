"""The real ComfyUIs that the tests run the pack in, and how each is started.

Leg (a) is `comfyui==0.0.1` from PyPI in `.venv-comfyui`, which the Makefile builds: the oldest supported stack. The
others are checkouts: those that `COMFYUI_PATH` names, separated as in `PATH`, else each `~/ComfyUI*`. Leg (b) is the
oldest before 0.20, leg (c) the newest from then on, the rest follow by version. A checkout runs with an interpreter of
`COMFYUI_PYTHON`, which has them in the order of the checkouts, else with that of a virtual environment in it (`.venv`,
`venv`) or beside it (`~/ComfyUI-venv`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
from comfyui_onediff_guard.headless.hosts import process
from waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "ComfyUI-OneDiff-Guard"  # the pack's name in custom_nodes, as a clone has it
SHIPPED = (
    *("comfyui_host", "demo", "headless", "nodes", "pipelines", "precision", "trust"),
    *("workflows", "subgraphs", "locales", "web"),
)
BIN = "Scripts" if sys.platform == "win32" else "bin"
CURRENT = (0, 20)  # what a ComfyUI of leg (c) is at least
OPTIONAL_FLAGS = {"--database-url": "sqlite:///:memory:", "--disable-api-nodes": None}


@dataclass(frozen=True)
class Leg:
    name: str  # "a", "b", "c", …
    version: str  # of ComfyUI; "" if it is missing
    python: Path
    program: tuple[str, ...]  # arguments after the interpreter
    base_flag: str  # names the folder of models, custom nodes and outputs
    workflow: Path  # the shipped workflow whose nodes this ComfyUI has
    missing: str  # why it cannot run here, and what would help; "" if it can

    @property
    def id(self) -> str:
        """Used in the ids of its tests."""
        return f"leg_{self.name}"

    @property
    def is_current(self) -> bool:
        return tuple(map(int, self.version.split("."))) >= CURRENT

    @property
    def checkout(self) -> Path:
        """Its folder, if it is a checkout."""
        return Path(self.program[0]).parent

    def command(self, base: Path, port: int) -> list[str]:
        listen = ["--cpu", "--listen", "127.0.0.1", "--port", str(port), self.base_flag, str(base)]
        return [str(self.python), *self.program, *listen]


def leg_a() -> Leg:
    folder = ROOT / ".venv-comfyui"
    found = (folder / ".installed").is_file()
    return Leg(
        name="a",
        version="0.0.1",
        python=_interpreter(folder),
        program=("-m", "comfy.cmd.main"),
        base_flag="--cwd",
        workflow=ROOT / "workflows" / "api" / "cogvideox_text_to_video_webp.json",
        missing="" if found else "leg (a): no .venv-comfyui; `make .venv-comfyui/.installed` builds it",
    )


def checkouts() -> tuple[Leg, ...]:
    """Legs (b) and (c), whether found or not, and one for each further checkout."""
    named = os.environ.get("COMFYUI_PATH")
    places = [Path(name).expanduser() for name in named.split(os.pathsep)] if named else _at_home()
    pythons = dict(zip(places, os.environ.get("COMFYUI_PYTHON", "").split(os.pathsep), strict=False))
    folders = {place.resolve(): place for place in reversed(places) if (place / "main.py").is_file()}
    found = sorted(folders.values(), key=_release)
    older = [place for place in found if _release(place) < CURRENT]
    chosen = {"b": next(iter(older), None), "c": found[-1] if len(found) > len(older) else None}
    others = (place for place in found if place not in chosen.values())
    chosen |= dict(zip(ascii_lowercase[3:], others, strict=False))
    wanted = {"b": "before 0.20", "c": "of 0.20 or newer"}
    where = f"at {named}" if named else "in your home folder, as ComfyUI*"
    return tuple(
        _checkout(name, place, pythons.get(place, "")) if place else _absent(name, f"no ComfyUI {wanted[name]} {where}")
        for name, place in chosen.items()
    )


def _at_home() -> list[Path]:
    return sorted(Path.home().glob("ComfyUI*"))


def _absent(name: str, what: str) -> Leg:
    what_to_do = "put a checkout there or name it in COMFYUI_PATH, then `make comfyui-env CHECKOUT=…`"
    return Leg(name, "", Path(sys.executable), (), "", Path(), missing=f"leg ({name}): {what}; {what_to_do}")


def _checkout(name: str, checkout: Path, named: str) -> Leg:
    """named: its interpreter; "" to search for one."""
    version = ".".join(map(str, _release(checkout))) or "of an unknown version"
    environments = (checkout / ".venv", checkout / "venv", checkout.with_name(f"{checkout.name}-venv"))
    python = next(filter(Path.is_file, [Path(named)] if named else map(_interpreter, environments)), None)
    reason = f"{named} of COMFYUI_PYTHON is not there" if named else "no environment in it or beside it"
    what_to_do = f"`make comfyui-env CHECKOUT={checkout}` makes one, or set COMFYUI_PYTHON"
    text = (checkout / "comfy" / "cli_args.py").read_text(encoding="utf-8")
    flags = [part for flag, value in OPTIONAL_FLAGS.items() if flag in text for part in (flag, value) if part]
    return Leg(
        name=name,
        version=version,
        python=python or Path(sys.executable),
        program=(str(checkout / "main.py"), *flags),
        base_flag="--base-directory",
        workflow=ROOT / "workflows" / "api" / "cogvideox_text_to_video.json",
        missing="" if python else f"leg ({name}): ComfyUI {version} at {checkout}: {reason}; {what_to_do}",
    )


def _release(checkout: Path) -> tuple[int, ...]:
    """For example (0, 33, 0); () if unknown."""
    file = checkout / "comfyui_version.py"
    found = re.search(r'__version__ = "([\d.]+)', file.read_text(encoding="utf-8")) if file.is_file() else None
    return tuple(map(int, found[1].strip(".").split("."))) if found else ()


def _interpreter(environment: Path) -> Path:
    return environment / BIN / ("python.exe" if sys.platform == "win32" else "python")


LEGS = (leg_a(), *checkouts())
CHECKOUTS = LEGS[1:]
IN_CHECKOUTS = [  # pytestmark of a file whose server is each checkout in turn
    pytest.mark.comfyui,
    pytest.mark.parametrize("any_leg", CHECKOUTS, indirect=True, ids=attrgetter("id")),
]


@dataclass
class Server:
    """A running ComfyUI."""

    leg: Leg
    url: str
    base: Path  # its models, custom_nodes, input, output
    log: Path
    pid: int

    def ask(self, path: str, body: Any = None) -> Any:
        """GET, or POST if there is a body. Returns the JSON answer, None if it is empty."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read()
        return json.loads(text) if text.strip().startswith((b"{", b"[")) else None

    def log_text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def count(self, text: str) -> int:
        """Number of log lines that contain this text."""
        return sum(text in line for line in self.log_text().splitlines())

    def history(self) -> dict[str, Any]:
        return self.ask("/history")

    def ended(self, prompt_id: str) -> dict[str, Any]:
        """Wait for the end of a prompt and return its history entry."""
        wait_until(lambda: prompt_id in self.history(), lambda: f"the prompt does not end:\n{self.tail()}")
        return self.history()[prompt_id]

    def run(self, prompt: dict[str, Any], client_id: str | None = None, **extra: Any) -> dict[str, Any]:
        """Queue a prompt, by default without a client id. Returns its history entry when it has ended."""
        told = {"prompt": prompt, "extra_data": extra} | ({"client_id": client_id} if client_id else {})
        answer = self.ask("/prompt", told)
        return self.ended(answer["prompt_id"])

    def files_of(self, entry: dict[str, Any]) -> list[Path]:
        """Images and videos of a run, from its history entry."""
        made = [image for output in entry["outputs"].values() for image in output.get("images", [])]
        return [self.base / "output" / image["subfolder"] / image["filename"] for image in made]

    def profiles(self) -> list[Path]:
        """The profiles that runs have written."""
        return [*(self.base / "user" / "onediff_guard" / "profiles").glob("*.json")]

    def forget(self) -> None:
        """Delete the profiles."""
        for profile in self.profiles():
            profile.unlink()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])


def install_pack(custom_nodes: Path) -> Path:
    """Copy the pack into custom_nodes as a clone has it. Not a link, which needs rights on Windows."""
    target = custom_nodes / FOLDER
    target.mkdir(parents=True)
    for name in ("__init__.py", "__main__.py", "pyproject.toml", "requirements.txt"):
        shutil.copy2(ROOT / name, target / name)
    for name in SHIPPED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


@contextmanager
def started(leg: Leg, base: Path, *options: str, port: int = 0) -> Iterator[Server]:
    """Run the leg's ComfyUI on a port of 127.0.0.1 (0: a free one) with `base` as its folder; end all its processes."""
    port = port or free_port()
    for name in ("input", "output", "temp", "user", "hub", "custom_nodes"):
        (base / name).mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(base / "hub"),  # 0.0.1 lists it and fails if it is missing
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TORCH_LOGS": "recompiles",
    }
    log = base / "comfyui.log"
    with process.running([*leg.command(base, port), *options], cwd=base, log=log, env=environment) as child:
        server = Server(leg, f"http://127.0.0.1:{port}", base, log, child.pid)
        wait_until(lambda: _answers(server), lambda: f"ComfyUI is up\n{server.tail()}", child)
        yield server


def _answers(server: Server) -> bool:
    try:
        return server.ask("/queue") is not None
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
