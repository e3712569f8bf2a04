"""Simulated machines: network namespaces on their own bridge, each a node of a Ray cluster.

Each has a name, an address and its own folder for compiled code; the disk is shared. Needs root and iproute2.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from waiting import wait_until

PORT = 6379
START_SECONDS = 120.0
QUICK = {  # notice a lost head quickly; Ray's default is a minute
    "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
}


def why_not() -> str:
    """Why machines cannot be simulated here, or ""."""
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need Linux, root and iproute2"
    name = f"odg-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=False)
    return ""


@dataclass
class Machine:
    name: str
    address: str
    folder: Path  # for its own files
    environment: dict[str, str]

    def command(self, *words: str) -> list[str]:
        """The command to run `words` on this machine, with its hostname."""
        named = f'hostname {self.name} && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, "sh", *words]

    def start_ray(self, head: str, gpus: int = 0) -> None:
        """Start a Ray node; the head if `head` is its own address. gpus: reported to Ray."""
        at = ["--head", "--port", str(PORT)] if head == self.address else ["--address", f"{head}:{PORT}"]
        options = [*at, "--node-ip-address", self.address, "--num-cpus", "1", "--num-gpus", str(gpus)]
        options += ["--object-store-memory", str(100 * 2**20), "--disable-usage-stats"]
        if head == self.address:
            options += ["--include-dashboard", "false", "--temp-dir", str(self.folder / "ray")]
        done = subprocess.run(
            self.command(sys.executable, "-m", "ray.scripts.scripts", "start", *options),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def processes(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(pid) for pid in found.stdout.split()]

    def lose(self) -> None:
        """Kill all its processes."""

        def ended() -> bool:
            for pid in (pids := self.processes()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(ended, f"{self.name} is lost")


@contextmanager
def machines(names: Sequence[str], folder: Path, environment: dict[str, str]) -> Iterator[list[Machine]]:
    """Machines on one bridge. folder: parent of their folders; a short path, for sockets."""
    mark = uuid.uuid4().hex[:4]
    bridge, hub = f"odgb{mark}", f"odg{mark}hub"
    made: list[Machine] = []
    try:
        _ip(f"netns add {hub}")
        _ip(f"-n {hub} link add {bridge} type bridge")
        _ip(f"-n {hub} link set {bridge} up")
        for number, name in enumerate(names, 1):
            own = folder / name
            own.mkdir()
            more = {"ONEDIFF_GUARD_COMPILED": str(own / "compiled"), "ONEDIFF_GUARD_COMPILED_GB": "1", **QUICK}
            machine = Machine(f"odg{mark}{name}", f"10.77.0.{number}", own, {**environment, **more})
            made.append(machine)
            _ip(f"netns add {machine.name}")
            _ip(f"-n {hub} link add v{mark}{number} type veth peer name eth0 netns {machine.name}")
            _ip(f"-n {hub} link set v{mark}{number} master {bridge} up")
            _ip(f"-n {machine.name} address add {machine.address}/24 dev eth0")
            _ip(f"-n {machine.name} link set eth0 up")
            _ip(f"-n {machine.name} link set lo up")
        yield made
    finally:
        for machine in made:
            machine.lose()
        for name in (*(machine.name for machine in made), hub):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
