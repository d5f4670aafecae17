"""The page and what it asks for: lists and snapshots as JSON, changes as server-sent events."""
# No `from __future__ import annotations`: FastAPI reads the annotations of functions whose types are imported late.

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from keyhole.errors import FileError, KeyholeError, UsageError
from keyhole.live.form import InvalidForm, describe_form
from keyhole.live.manager import Busy, NoSuchRun, Runs
from keyhole.live.run import FILES, Run
from keyhole.optional import KEYHOLE_VERSION, extra
from keyhole.runs.store import plain

if TYPE_CHECKING:
    from fastapi import APIRouter, FastAPI
    from fastapi.responses import Response

LOOK_SECONDS = 0.1  # between two looks whether something changed
ALIVE_SECONDS = 10.0  # between two signs of life where nothing does
LARGEST = 2**16  # bytes of a form
PAGES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
# A report is a page of its own: it may run the code inside it, but not as part of this one.
SANDBOX = (
    "sandbox allow-scripts allow-popups; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; font-src data:"
)


def make_empty_app() -> Any:
    """An application without a served oracle."""
    for library in ("orjson", "fastapi"):
        extra(library, "serve", "the page")
    from fastapi import FastAPI  # noqa: PLC0415 - in the extra serve

    return FastAPI(title="Keyhole", version=KEYHOLE_VERSION, docs_url=None, redoc_url=None, openapi_url=None)


def add_page(app: "FastAPI", runs: Runs, closing: Callable[[], bool]) -> None:
    """Add the page of these runs to an application."""
    for router in (_static_files(), _states_of(runs), _actions_on(runs), _events_of(runs, closing)):
        app.include_router(router, include_in_schema=False)
    app.add_exception_handler(KeyholeError, _refuse)


def _static_files() -> "APIRouter":
    """The files that make the page."""
    from fastapi import APIRouter  # noqa: PLC0415
    from fastapi.responses import Response  # noqa: PLC0415

    router = APIRouter()

    def page(name: str, kind: str) -> Callable[[], Any]:
        content = files("keyhole.live").joinpath("static", name).read_bytes()

        async def file() -> Response:
            return Response(content, media_type=kind)

        return file

    for path, (name, kind) in PAGES.items():
        router.get(path, name=name)(page(name, kind))
    return router


def _states_of(runs: Runs) -> "APIRouter":
    """What a page reads: the form, the list of runs, one of them, its files, and several compared."""
    from fastapi import APIRouter  # noqa: PLC0415
    from fastapi.responses import JSONResponse, Response  # noqa: PLC0415

    router = APIRouter()

    @router.get("/api/form")
    async def form() -> dict[str, Any]:
        return {"families": describe_form(runs.served), "version": KEYHOLE_VERSION}

    @router.get("/api/runs")
    async def listed() -> dict[str, Any]:
        return runs.brief()

    @router.get("/api/runs/{identity}")
    async def one(identity: str) -> Response:
        return JSONResponse(runs.get(identity).snapshot())

    @router.get("/api/runs/{identity}/files/{name}")
    async def file(identity: str, name: str) -> Response:
        content = await _in_thread(runs.get(identity).read, name)
        headers = {"Content-Security-Policy": SANDBOX} if name == "report.html" else {}
        if name != "report.html":
            headers["Content-Disposition"] = f'attachment; filename="{identity}-{name}"'
        return Response(content, media_type=FILES[name], headers=headers)

    @router.get("/api/runs/{identity}/attention")
    async def attention(identity: str) -> Response:
        return JSONResponse(await _in_thread(runs.get(identity).attention))

    @router.get("/api/compare")
    async def compare(names: str = "") -> Response:
        return JSONResponse(await _in_thread(runs.compare, [name for name in names.split(",") if name]))

    return router


def _actions_on(runs: Runs) -> "APIRouter":
    """What a page changes: runs are started, stopped, resumed and written about."""
    from fastapi import APIRouter, Request  # noqa: PLC0415
    from fastapi.responses import Response  # noqa: PLC0415

    router = APIRouter()

    @router.post("/api/runs")
    async def start(request: Request) -> Response:
        return await _act(request, runs.start, 201)

    @router.post("/api/runs/{identity}/stop")
    async def stop(request: Request, identity: str) -> Response:
        return await _act(request, lambda _: runs.stop(identity))

    @router.post("/api/runs/{identity}/resume")
    async def resume(request: Request, identity: str) -> Response:
        return await _act(request, lambda given: runs.resume(identity, _budget(given)))

    @router.post("/api/runs/{identity}/remarks")
    async def remark(request: Request, identity: str) -> Response:
        return await _act(request, lambda given: runs.remark(identity, given))

    return router


def _events_of(runs: Runs, closing: Callable[[], bool]) -> "APIRouter":
    """Changes as they happen."""
    from fastapi import APIRouter  # noqa: PLC0415
    from fastapi.responses import Response, StreamingResponse  # noqa: PLC0415

    router = APIRouter()

    @router.get("/api/events")
    async def events(run: str = "") -> Response:
        """Everything first, then what changes: whoever comes late or again knows as much as the others."""
        return StreamingResponse(_changes(runs, run, closing), media_type="text/event-stream")

    return router


async def _refuse(_: Any, error: Exception) -> "Response":
    """What a page is told where something cannot be done."""
    from fastapi.responses import JSONResponse  # noqa: PLC0415

    kinds = ((InvalidForm, 422), (NoSuchRun, 404), (FileError, 404), (Busy, 429), (UsageError, 422))
    status = next((status for kind, status in kinds if isinstance(error, kind)), 409)
    fields = {"fields": error.fields} if isinstance(error, InvalidForm) else {}
    return JSONResponse({"error": str(error), **fields}, status)


async def _act(request: Any, action: Callable[[Any], Run], status: int = 200) -> "Response":
    """Carry out what was posted; the run that it is about."""
    from fastapi.responses import JSONResponse  # noqa: PLC0415

    body = await _body(request)
    if body is None:
        return JSONResponse({"error": f"a form has at most {LARGEST} bytes"}, 413)
    try:
        given = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return JSONResponse({"error": "this is no JSON"}, 400)
    try:
        run = await _in_thread(action, given)
    except (FileError, OSError) as error:
        return JSONResponse({"error": f"{error}; the folder for runs is named by --runs"}, 507)
    return JSONResponse(run.brief(), status)


def _budget(given: Any) -> int | None:
    budget = given.get("budget") if isinstance(given, dict) else None
    if isinstance(budget, str):
        budget = int(budget) if budget.strip().isdecimal() and len(budget) < 16 else budget or None
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise InvalidForm({"budget": "a whole number"})
    return budget


async def _in_thread(act: Callable[..., Any], *given: Any) -> Any:
    """Away from the loop, which others wait for."""
    return await asyncio.get_running_loop().run_in_executor(None, act, *given)


async def _body(request: Any) -> bytes | None:
    """What was sent, or None where it is too long."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > LARGEST:
            return None
        pieces.append(piece)
    return b"".join(pieces)


async def _changes(runs: Runs, identity: str, closing: Callable[[], bool]) -> AsyncIterator[str]:
    """The list of runs, and one of them with its pictures, whenever they have changed.

    Whole states are sent, not differences: one that is lost or late does no harm.
    """
    yield "retry: 1000\n\n"
    sent: dict[str, Any] = {}
    silent = 0.0
    last = False
    while not last:
        last, changed = closing(), False  # what changed until then is still sent
        for event, version, state in _states(runs, identity):
            if sent.get(event) != version:
                sent[event], changed = version, True
                text = json.dumps(plain(state()), allow_nan=False)
                yield f"event: {event}\nid: {'.'.join(map(str, version))}\ndata: {text}\n\n"
        silent = 0.0 if changed else silent + LOOK_SECONDS
        if silent > ALIVE_SECONDS:
            silent = 0.0
            yield ": alive\n\n"
        if not last:
            await asyncio.sleep(LOOK_SECONDS)
    yield "event: end\ndata: {}\n\n"


def _states(runs: Runs, identity: str) -> list[tuple[str, tuple[Any, ...], Callable[[], Any]]]:
    """(event, version, what to send) of everything a page shows."""
    states: list[tuple[str, tuple[Any, ...], Callable[[], Any]]] = [("runs", (runs.version,), runs.brief)]
    try:
        run = runs.get(identity)
    except NoSuchRun:
        return [*states, ("missing", (identity,), dict)] if identity else states
    record = run.record  # a resumed run has a new one
    versions = run.attempts, run.state, run.remarked
    states.append(("run", (run.id, *versions, record.version), run.snapshot))
    states.append(("pictures", (run.id, run.attempts, record.picture_version), record.pictures))
    return states
