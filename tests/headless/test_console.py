"""`onediff-guard`: exit codes, stdout for people and for scripts, errors without a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.headless.hosts import local
from comfyui_onediff_guard.pipelines.errors import DeviceGone, LibraryFailed


@pytest.fixture
def here(tmp_path: Path, workflow: dict[str, Any], classes: dict[str, type], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with workflow.json, where the stand-in nodes are what this process knows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "default_classes", lambda: classes)
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    return tmp_path


def test_files_and_summary_for_people(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "workflow.json", "--set", "1.text=a fox"]) == 0
    out, err = capsys.readouterr()
    files = [str(Path("output", "pictures", f"noise_0000{n}_.png")) for n in (1, 2, 3)]
    assert out.splitlines() == [*files, "1: 32 px, a fox"]
    assert err.splitlines() == ["node 1 (Some Noise)", "node 2 (SaveImage)"]


def test_one_json_object_for_scripts(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "workflow.json", "--json", "--out", "elsewhere"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["status"] == "done"
    assert all(Path(path).is_file() for path in told["files"])
    assert told["outputs"]["1"]["onediff_guard"] == [{"peak": "inf"}]


def test_a_console_without_the_character_is_no_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = TextIOWrapper(BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    assert cli.main(["run", "workflow.json", "--set", "1.text=fp16 \u2192 fp32"]) == 0
    console.seek(0)
    assert "fp16 ? fp32" in console.read()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nothing.json"], 2, "Cannot read the workflow nothing.json"),
        (["workflow.json", "--set", "1.width=1"], 2, "must be at least 8"),
        (["workflow.json", "--set", "x"], 2, "expected NODE.INPUT=VALUE"),
        (["workflow.json", "--server", "127.0.0.1:9"], 3, "No ComfyUI answers"),
        (["workflow.json", "--server", "127.0.0.1:9", "--models", "m"], 2, "--models has no meaning"),
        (["workflow.json", "--comfyui", "."], 2, "there is no main.py"),
        (["broken.json"], 4, "the GPU is on fire"),
        (["workflow.json", "--out", "workflow.json"], 5, "Cannot write"),
    ],
)
def test_exit_codes(
    here: Path, workflow: dict[str, Any], arguments: list[str], code: int, message: str, capsys: Any
) -> None:
    broken = workflow | {"2": {"class_type": "Broken", "inputs": {"images": ["1", 0]}}}
    (here / "broken.json").write_text(json.dumps(broken))
    assert cli.main(["run", *arguments, "--json"]) == code
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["status"], told["exit_code"]) == ("error", code)
    assert message in told["error"]
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["fly"],
        *(["run", "w.json", "--timeout", seconds] for seconds in ("-1", "nan", "1e400", "1e300", "x")),
        ["run", "w", "--server", "a", "--comfyui", "b"],
    ],
)
def test_bad_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LibraryFailed("transformers cannot be imported."), "transformers cannot be imported."),
        (DeviceGone("cuda:0 gives no answer any more."), "cuda:0 gives no answer any more."),
        (KeyError("x"), "Unexpected KeyError: 'x'. Run with --verbose to see where."),
    ],
)
def test_an_error_meant_for_people_is_said_as_it_is(error: Exception, said: str, capsys: Any) -> None:
    def main(_args: Any) -> int:
        raise error

    command = cli.Subcommand("fly", "", lambda: SimpleNamespace(add_arguments=lambda _parser: None, main=main))
    assert cli.main(["fly"], [command]) == 4
    assert capsys.readouterr().err.strip() == f"onediff-guard: {said}"


def test_verbose_shows_where(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "nothing.json", "--verbose"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from comfyui_onediff_guard.headless.commands import cli\n"
        "try: cli.main(['run', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'av', 'aiohttp', 'diffusers'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "--set" in done.stdout
