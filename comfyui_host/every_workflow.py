"""Guard every workflow: insert a NaN Guard before each use of a MODEL or VAE in a queued prompt.

ComfyUI passes each prompt to its prompt handlers before it validates it. Ours inserts guard nodes into a copy of the
prompt; nothing is patched, and no workflow file changes. Whether a prompt is guarded is decided by, in this order: the
prompt itself (`extra_data.onediff_guard`), the environment variable, and the settings of the user who queued it.
"""

from __future__ import annotations

import logging
import os
import time
from contextvars import ContextVar
from typing import Any

from . import black_output, host
from .compat import tell_once, unless_changed, what_changed
from .guarded_prompt import with_guards
from .page_settings import DEFAULT, settings_of

VARIABLE = "ONEDIFF_GUARD_EVERY_WORKFLOW"
KEY = "onediff_guard"  # in a prompt's extra_data
SETTING = "OneDiffGuard.EveryWorkflow"  # the id of the page's setting (web/every_workflow.js)
FAST_FP16 = "OneDiffGuard.FastFp16"
OFFER_RERUN = "OneDiffGuard.OfferRerun"  # on by default
INHERIT, AUTO = "inherit", "auto"  # precisions of an inserted guard

_user: ContextVar[str] = ContextVar("onediff_guard_user", default=DEFAULT)

logger = logging.getLogger(__name__)


@unless_changed("'Guard every workflow'", None)
def install() -> None:
    """Register our prompt handler with ComfyUI's server, if there is one."""
    server = host.server()
    if server is None:
        return
    server.add_on_prompt_handler(on_prompt)
    try:
        _note_users(server)
    except Exception as error:  # noqa: BLE001 - a server of another kind
        logger.info("Guard every workflow: all users of this ComfyUI share one setting: %s", error)


def on_prompt(data: Any, *_: Any, **_more: Any) -> Any:
    """Return the request's JSON, with guards in its prompt if the prompt is to be guarded. Never raises."""
    started = time.perf_counter()
    try:
        data = _without_summaries(data)
        precision = wanted(data)
        prompt = data.get("prompt") if precision and isinstance(data, dict) else None
        if isinstance(prompt, dict):
            guarded, guards = with_guards(prompt, host.node_classes(), precision)
            if guards:
                milliseconds = (time.perf_counter() - started) * 1e3
                logger.info("Guard every workflow: added %d guards (%s) in %.2f ms", guards, precision, milliseconds)
                return {**data, "prompt": guarded}
        elif isinstance(data, dict) and settings_of(_user.get()).get(OFFER_RERUN) is not False:
            return black_output.watch(data)
    except Exception as error:
        if why := what_changed(error):
            tell_once("'Guard every workflow', and the offer to rerun a black result", why)
        else:
            logger.exception("Guard every workflow failed: this prompt runs unguarded")
    return data


def wanted(data: Any) -> str:
    """Return the precision of the guards in a prompt: "inherit" or "auto"; "" if it gets none."""
    extra = data.get("extra_data") if isinstance(data, dict) else None
    settings = settings_of(_user.get())
    automatic = AUTO if settings.get(FAST_FP16) is True else INHERIT
    for asked in (extra.get(KEY) if isinstance(extra, dict) else None, os.environ.get(VARIABLE), settings.get(SETTING)):
        if asked is not None and asked != "":
            word = str(asked).strip().lower()
            return word if word in (INHERIT, AUTO) else automatic if word in ("1", "true", "yes", "on") else ""
    return ""


def _without_summaries(data: Any) -> Any:
    """Return the request without report lines of an earlier run: a prompt from the history carries those."""
    extra = data.get("extra_data") if isinstance(data, dict) else None
    if not isinstance(extra, dict) or host.SUMMARIES not in extra:
        return data
    return {**data, "extra_data": {key: value for key, value in extra.items() if key != host.SUMMARIES}}


def _note_users(server: Any) -> None:
    """Set the user of each request in a context variable, since ComfyUI does not pass the user to prompt handlers."""
    from aiohttp import web

    @web.middleware
    async def noting(request: web.Request, handler: Any) -> Any:
        try:
            _user.set(_user_of(server, request))
        except Exception:  # noqa: BLE001 - an unknown user, whom ComfyUI itself refuses
            _user.set(DEFAULT)
        return await handler(request)

    server.app.middlewares.append(noting)


@unless_changed("a separate switch for each user of a server", DEFAULT)
def _user_of(server: Any, request: Any) -> str:
    return server.user_manager.get_request_user_id(request)
