"""`onediff-guard`: exit codes, stdout for people and for scripts, errors without a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from comfyui_onediff_guard.headless.commands import cli
from comfyui_onediff_guard.pipelines.errors import BadSize, DeviceGone, LibraryFailed

Console = Callable[..., tuple[int, str, str]]


def test_files_and_summary_for_people(here: Path, console: Console) -> None:
    code, out, err = console("run", "workflow.json", "--set", "1.text=a fox")
    files = [str(Path("output", "pictures", f"noise_0000{n}_.png")) for n in (1, 2, 3)]
    assert (code, out.splitlines()) == (0, [*files, "1: 32 px, a fox"])
    assert err.splitlines() == ["node 1 (Some Noise)", "node 2 (SaveImage)"]


def test_one_json_object_for_scripts(here: Path, console: Console) -> None:
    code, out, _ = console("run", "workflow.json", "--json", "--out", "elsewhere")
    told = json.loads(out, parse_constant=pytest.fail)
    assert (code, told["status"]) == (0, "done")
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
        (["workflow.json", "--server", "127.0.0.1:9"], 3, "No ComfyUI answers at http://127.0.0.1:9"),
        (["workflow.json", "--server", "127.0.0.1:9"], 3, "--comfyui DIR"),
        (["workflow.json", "--server", "127.0.0.1:9", "--models", "m"], 2, "--models has no meaning"),
        (["workflow.json", "--comfyui", "."], 2, "there is no main.py"),
        (["workflow.json", "--guard"], 2, "--guard has no meaning without --server"),
        (["broken.json"], 4, "the GPU is on fire"),
        (["workflow.json", "--out", "workflow.json"], 5, "Cannot write"),
    ],
)
def test_exit_codes(
    here: Path, workflow: dict[str, Any], console: Console, arguments: list[str], code: int, message: str
) -> None:
    broken = workflow | {"2": {"class_type": "Broken", "inputs": {"images": ["1", 0]}}}
    (here / "broken.json").write_text(json.dumps(broken))
    found, out, err = console("run", *arguments, "--json")
    told = json.loads(out)
    assert (found, told["status"], told["exit_code"]) == (code, "error", code)
    assert message in told["error"] and message in err and "Traceback" not in err
    assert "Traceback" in console("run", *arguments, "--verbose")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["run"],
        ["fly"],
        *(["run", "w.json", "--timeout", seconds] for seconds in ("-1", "nan", "1e400", "1e300", "x")),
        ["run", "w", "--server", "a", "--comfyui", "b"],
        *(["compare", "workflow.json", "--precisions", precisions] for precisions in ("fp32", "", ",")),
        ["doctor", "--precision", "int4"],
        ["doctor", "--accumulation", "on"],
        ["doctor", "model"],
        ["doctor", "--vram", "12 GB"],
        ["doctor", "--vram", "12", "--size", "720"],
    ],
)
def test_bad_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (LibraryFailed("transformers cannot be imported."), 4, "transformers cannot be imported."),
        (DeviceGone("cuda:0 gives no answer any more."), 4, "cuda:0 gives no answer any more."),
        (BadSize("0 x 0 is no size."), 2, "0 x 0 is no size."),
        (KeyError("x"), 4, "Unexpected KeyError: 'x'. Run with --verbose to see where."),
        (KeyboardInterrupt(), 130, "Interrupted."),
    ],
)
def test_an_error_meant_for_people_is_said_as_it_is(error: BaseException, code: int, said: str, capsys: Any) -> None:
    def main(_args: Any) -> cli.Answer:
        raise error

    command = cli.Subcommand("fly", "", lambda: SimpleNamespace(add_arguments=lambda _parser: None, main=main))
    assert cli.main(["fly"], [command]) == code
    assert capsys.readouterr().err.strip() == f"onediff-guard: {said}"


@pytest.mark.parametrize(("command", "option"), [("run", "--set"), ("doctor", "--arch")])
def test_help_imports_nothing_heavy(fresh_python: Callable[..., str], command: str, option: str) -> None:
    code = (
        "import sys; from comfyui_onediff_guard.headless.commands import cli\n"
        f"try: cli.main(['{command}', '--help'])\n"
        "except SystemExit: print(sorted({'torch', 'av', 'aiohttp', 'diffusers'} & set(sys.modules)))"
    )
    out = fresh_python(code)
    assert out.endswith("[]\n") and option in out
