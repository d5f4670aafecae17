"""The pages of a server: health, metadata and inference of the Open Inference Protocol v2."""
# No `from __future__ import annotations`: FastAPI reads the annotations of functions whose types are imported late.

import asyncio
import hmac
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keyhole.inference_protocol import BINARY_EXTENSION, HEADER_LENGTH
from keyhole.optional import KEYHOLE_VERSION, extra
from keyhole.serve.openapi import ANSWERED, LENGTH, path_parameters, question, refusals
from keyhole.serve.served_oracle import Refusal, ServedOracle

if TYPE_CHECKING:
    from fastapi import FastAPI

EXTENSIONS = [BINARY_EXTENSION, "model_configuration"]
log = logging.getLogger("keyhole.serve")


@dataclass(frozen=True)
class RequestChecks:
    """Who may ask what; each check raises Refusal."""

    served: ServedOracle
    token: str | None

    def check_token(self, request: Any) -> None:
        """Refuse whoever does not know the token."""
        given = request.headers.get("authorization", "")
        if self.token is not None and not hmac.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
            raise Refusal(401, "a token is needed: Authorization: Bearer TOKEN")

    def check_model(self, request: Any) -> None:
        """Refuse a model that is not here."""
        self.check_token(request)
        model, version = request.path_params["model"], request.path_params.get("version")
        if model != self.served.name:
            raise Refusal(404, f"unknown model {model[:80]!r}; this server has {self.served.name!r}")
        if version not in (None, self.served.version):
            raise Refusal(
                404, f"unknown version {version[:80]!r} of {model!r}; this server has {self.served.version!r}"
            )

    async def read_body(self, request: Any) -> bytes:
        """The body of a request, unless it is too long."""
        most = self.served.limits.body
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise Refusal(413, f"a request has at most {most} bytes")
        if request.headers.get("content-encoding", "identity") != "identity":
            raise Refusal(415, "requests are not compressed here: send them as they are")
        pieces, size = [], 0
        try:
            async with asyncio.timeout(self.served.limits.seconds):
                async for piece in request.stream():
                    pieces.append(piece)
                    size += len(piece)
                    if size > most:
                        raise Refusal(413, f"a request has at most {most} bytes")
        except TimeoutError:
            raise Refusal(408, f"a request arrives within {self.served.limits.seconds:g} seconds") from None
        return b"".join(pieces)


def make_app(served: ServedOracle, token: str | None = None) -> Any:  # a FastAPI application
    """The web application that serves an oracle, to clients that know the token where there is one."""
    for library in ("orjson", "fastapi"):
        extra(library, "serve", "serving")
    from fastapi import FastAPI, Request  # noqa: PLC0415 - in the extra serve

    app = FastAPI(
        title=f"Keyhole: {served.name}",
        version=KEYHOLE_VERSION,
        description="A box behind the Open Inference Protocol v2, served to rehearse an audit.",
        docs_url=None,  # those pages load scripts from other servers
        redoc_url=None,
    )
    checks = RequestChecks(served, token)
    _say_errors(app, served)

    @app.get("/v2", responses=refusals(401))
    async def server_metadata(request: Request) -> dict[str, Any]:
        """Name, version and extensions of the server."""
        checks.check_token(request)
        return {"name": "keyhole", "version": KEYHOLE_VERSION, "extensions": EXTENSIONS}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        """Whether the server runs."""
        return {"live": True}

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        """Whether the server can be asked."""
        return {"ready": True}

    _add_model(app, served, checks)
    return app


def _add_model(app: "FastAPI", served: ServedOracle, checks: RequestChecks) -> None:
    """The pages of the model, each with and without its version in the address."""
    from fastapi import Request  # noqa: PLC0415
    from fastapi.responses import Response  # noqa: PLC0415

    worker = ThreadPoolExecutor(1, thread_name_prefix="keyhole-box")  # the loop stays free for health checks

    async def metadata(request: Request) -> dict[str, Any]:
        """Inputs and outputs of the model."""
        checks.check_model(request)
        return served.metadata()

    async def model_ready(request: Request) -> dict[str, Any]:
        """Whether the model can be asked."""
        checks.check_model(request)
        return {"name": served.name, "ready": True}

    async def config(request: Request) -> dict[str, Any]:
        """Batch limit and tensors, as Triton's extension has them."""
        checks.check_model(request)
        return served.config()

    async def infer(request: Request) -> Response:
        """Answer a batch of sequences."""
        checks.check_model(request)
        body, size = await checks.read_body(request), request.headers.get(HEADER_LENGTH)
        answering = asyncio.get_running_loop().run_in_executor(worker, served.infer, body, size)
        try:
            answer, headers = await asyncio.wait_for(answering, served.limits.seconds)
        except TimeoutError:  # what the box computes cannot be interrupted; the next request waits for it in its turn
            raise Refusal(504, f"the box took more than {served.limits.seconds:g} seconds to answer") from None
        return Response(answer, headers=headers)

    for page, names in (
        ("/v2/models/{model}", {"model": served.name}),
        ("/v2/models/{model}/versions/{version}", {"model": served.name, "version": served.version}),
    ):
        kind = " of a version" if "version" in names else ""
        for path, endpoint in (("", metadata), ("/ready", model_ready), ("/config", config)):
            app.get(
                page + path,
                name=endpoint.__name__ + kind,
                responses=refusals(401, 404),
                openapi_extra={"parameters": path_parameters(names)},
            )(endpoint)
        app.post(
            f"{page}/infer",
            name=infer.__name__ + kind,
            response_class=Response,
            responses={**ANSWERED, **refusals(400, 401, 403, 404, 408, 413, 415, 422, 429, 504)},
            openapi_extra={"requestBody": question(served.tokens), "parameters": [*path_parameters(names), LENGTH]},
        )(infer)


def _say_errors(app: "FastAPI", served: ServedOracle) -> None:
    """Every error as the protocol has it: {"error": words}."""
    from fastapi import Request  # noqa: PLC0415
    from fastapi.responses import JSONResponse  # noqa: PLC0415
    from starlette.exceptions import HTTPException  # noqa: PLC0415

    @app.exception_handler(Refusal)
    async def refused(_: Request, refusal: Refusal) -> JSONResponse:
        served.refused += 1
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {}
        if refusal.after is not None:  # in whole seconds, as HTTP has it, and as exactly as it is known
            headers = {
                "Retry-After": str(math.ceil(refusal.after)),
                "Retry-After-Ms": str(math.ceil(1000 * refusal.after)),
            }
        if refusal.status >= 500:
            log.error("%s", refusal)
        return JSONResponse({"error": str(refusal)}, refusal.status, headers)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"the server failed: {type(error).__name__}; see its log"}, 500)
