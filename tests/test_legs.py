"""Which ComfyUIs the tests find, and the table that tells what came of the tests in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import legs
import legs_table
import pytest

Place = Callable[..., Path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """place(name, version, environment) → a checkout in a home folder of its own."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("COMFYUI_PATH", raising=False)
    monkeypatch.delenv("COMFYUI_PYTHON", raising=False)

    def put(name: str, version: str, environment: str = "{}-venv") -> Path:
        checkout = tmp_path / name
        (checkout / "comfy").mkdir(parents=True)
        (checkout / "main.py").touch()
        (checkout / "comfy" / "cli_args.py").write_text('"--database-url"')
        (checkout / "comfyui_version.py").write_text(f'__version__ = "{version}"')
        if environment:
            python = legs._interpreter(tmp_path / environment.format(name))
            python.parent.mkdir(parents=True)
            python.touch()
        return checkout

    return put


def found() -> dict[str, str]:
    """Letter → version, of what can be run."""
    return {leg.name: leg.version for leg in legs.checkouts() if not leg.missing}


def missing() -> dict[str, str]:
    return {leg.name: leg.missing for leg in legs.checkouts() if leg.missing}


def test_checkouts_in_the_home_folder_are_ordered_by_version(place: Place) -> None:
    for name, version in {"": "0.33.0", "-old": "0.3.64", "-0.9": "0.9.2", "-new": "0.45.1", "-0.20": "0.20.0"}.items():
        place(f"ComfyUI{name}", version)
    assert found() == {"b": "0.3.64", "c": "0.45.1", "d": "0.9.2", "e": "0.20.0", "f": "0.33.0"}
    assert [leg.id for leg in legs.checkouts()] == ["leg_b", "leg_c", "leg_d", "leg_e", "leg_f"]


@pytest.mark.parametrize("environment", ["{}-venv", "{}/.venv", "{}/venv"])
def test_its_own_environment_runs_it(place: Place, environment: str) -> None:
    checkout = place("ComfyUI", "0.33.0", environment)
    leg = legs.checkouts()[1]
    assert leg.python == legs._interpreter(checkout.parent / environment.format("ComfyUI"))
    assert leg.command(Path("base"), 5)[1:4] == [str(checkout / "main.py"), "--database-url", "sqlite:///:memory:"]


def test_what_is_missing_is_told_with_what_to_do(place: Place) -> None:
    checkout = place("ComfyUI", "0.3.64", environment="")
    assert missing() == {
        "b": f"leg (b): ComfyUI 0.3.64 at {checkout}: no environment in it or beside it; `make comfyui-env "
        f"CHECKOUT={checkout}` makes one, or set COMFYUI_PYTHON",
        "c": "leg (c): no ComfyUI of 0.20 or newer in your home folder, as ComfyUI*; put a checkout there or name it "
        "in COMFYUI_PATH, then `make comfyui-env CHECKOUT=…`",
    }


def test_paths_are_named_with_their_interpreters(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    checkouts = [place("new", "0.33.0"), place("old", "0.3.64", "")]
    python = legs._interpreter(checkouts[0].with_name("new-venv"))
    monkeypatch.setenv("COMFYUI_PATH", legs.os.pathsep.join(map(str, checkouts)))
    assert found() == {"c": "0.33.0"}
    monkeypatch.setenv("COMFYUI_PYTHON", legs.os.pathsep.join([str(python), str(python)]))
    assert found() == {"b": "0.3.64", "c": "0.33.0"}
    monkeypatch.setenv("COMFYUI_PYTHON", legs.os.pathsep.join([str(python), "nowhere"]))
    assert "nowhere of COMFYUI_PYTHON is not there" in missing()["b"]


def test_two_names_of_one_checkout_are_one_leg(place: Place, tmp_path: Path) -> None:
    checkout = place("ComfyUI", "0.33.0")
    (tmp_path / "ComfyUI-again").symlink_to(checkout, target_is_directory=True)
    assert found() == {"c": "0.33.0"}


def report(nodeid: str, outcome: str, reason: str = "", when: str = "call") -> pytest.TestReport:
    said = ("file.py", 1, f"Skipped: {reason}") if reason else None
    return pytest.TestReport(nodeid, ("file.py", 0, ""), {}, outcome, said, when)  # pyright: ignore[reportArgumentType]


def test_the_table_counts_each_test_once_and_says_why_it_was_skipped() -> None:
    stats = {
        "passed": [
            report("a.py::t[leg_b]", "passed"),
            report("a.py::t[leg_c-x]", "passed"),
            report("c.py::t", "passed"),
        ],
        "failed": [report("a.py::t[leg_b-y]", "failed")],
        "error": [report("a.py::t[leg_b]", "failed", when="teardown")],
        "skipped": [report(f"a.py::{n}[x-leg_c]", "skipped", "no nvfp4 here") for n in range(2)],
    }
    assert [*legs_table.lines(stats, {"b": "0.3.64", "c": "0.33.0"})] == [
        "core                tests   passed   failed  skipped",
        "(b) 0.3.64              2        0        2        0",
        "(c) 0.33.0              3        1        0        2",
        "skipped in (c): 2: no nvfp4 here",
    ]
    assert not [*legs_table.lines({"passed": [report("c.py::t", "passed")]}, {})]


def test_comfyuis_own_models_are_tried_in_each_checkout(root: Path) -> None:
    tests = {file.name: file.read_text(encoding="utf-8") for file in (root / "tests" / "comfyui").glob("test_*.py")}
    runs = {name: text for name, text in tests.items() if "native.run(" in text}
    one_alone = [name for name, text in runs.items() if text.count("native.run(") > text.count("leg=leg)")]
    assert runs and not one_alone, "native.run(…) needs leg=leg there, of the fixture `leg`"
