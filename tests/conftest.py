"""What all tests share: the repository's root, and a process of its own for what must start from nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _kept_elsewhere(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test's runs learn and compile is not kept for the next test, nor for whoever runs the tests."""
    monkeypatch.setenv("ONEDIFF_GUARD_PROFILES", str(tmp_path_factory.mktemp("profiles")))
    monkeypatch.setenv("ONEDIFF_GUARD_COMPILED_GB", "0")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder that is both the repository and the package."""
    return ROOT


@pytest.fixture(scope="session")
def fresh_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Runs code in a new interpreter, away from the repository's root; returns its stdout, fails with its stderr."""
    elsewhere = tmp_path_factory.mktemp("fresh")

    def run(code: str, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=elsewhere,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """model_folder(variant, overflow) → a folder built once a session. Variants: small_families.BUILDERS."""
    from comfyui_onediff_guard.headless.small_families import BUILDERS

    root = tmp_path_factory.mktemp("models")

    def folder(variant: str = "2b", overflow: str = "none") -> Path:
        path = root / f"{variant}-{overflow}"
        if path.exists():
            return path
        options = {} if overflow == "none" else {"overflow": overflow}  # Stable Video Diffusion's has no overflow
        return BUILDERS[variant](path, **options)

    return folder
