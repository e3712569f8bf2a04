"""The second device: it computes as the CPU does, refuses what a card refuses, and sees what nothing orders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import second_device
import second_device_cases
from second_device import build

pytestmark = pytest.mark.skipif(bool(second_device.why_not()), reason=second_device.why_not() or "it can be built")


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """By case, what went wrong; all run in one process, which has the device from then on."""
    command = [sys.executable, second_device_cases.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", second_device_cases.CASES)
def test_it_is_as_a_card(errors: dict[str, str], case: str) -> None:
    assert not errors[case], errors[case]


@pytest.mark.parametrize(
    ("attribute", "value", "says"),
    [
        ("__version__", "2.99.0", "is written for PyTorch 2.13, and this is 2.99.0"),
        ("version.cuda", "12.8", "has CUDA of its own"),
        ("version.hip", "6.2", "has CUDA of its own"),
    ],
)
def test_where_it_cannot_be_it_says_why(monkeypatch: pytest.MonkeyPatch, attribute: str, value: str, says: str) -> None:
    monkeypatch.setattr(f"torch.{attribute}", value)
    assert says in second_device.why_not()
    with pytest.raises(RuntimeError, match=says):
        second_device.install()


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda _name: None)
    assert "no C++ compiler" in second_device.why_not()


def test_source_that_does_not_compile_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "HERE", tmp_path)
    for name in build.SOURCES:
        (tmp_path / name).write_text("this is no C++", encoding="utf-8")
    with pytest.raises(RuntimeError, match="does not build"):
        build.extension()
    assert not [*(tmp_path / "cache").rglob("*.so")]
