"""The result of a command: text for people, JSON for scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...trust.plain import for_json
from ..errors import ExitCode, HeadlessError


@dataclass(frozen=True)
class Answer:
    """A command's result. Printed as lines, or with --json as one object."""

    lines: Sequence[object] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    error: HeadlessError | None = None  # printed after the lines; its exit code is the command's
    exit_code: ExitCode = ExitCode.DONE  # if there is no error

    def as_json(self) -> str:
        state: dict[str, Any] = {"status": "done"}
        if self.error:
            state = {"status": "error", "exit_code": int(self.error.exit_code), "error": str(self.error)}
        return json.dumps(for_json({**state, **self.facts}), allow_nan=False)
