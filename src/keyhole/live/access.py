"""Who may ask the page anything: browsers that show it, and programs on the same machine."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

# Nothing from elsewhere, nothing inline, no frames: what the page shows cannot become code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
SAFE = ("GET", "HEAD")


def refused(method: str, path: str, headers: Mapping[str, str], host: str, port: int) -> tuple[int, str] | None:
    """Status and reason for a request that is not from the page itself; None for one that is.

    A name that somebody else's server resolves to this machine shows in the header Host (DNS rebinding), a page of
    another site in Origin or Sec-Fetch-Site. Numeric addresses and localhost cannot be made to mean another machine.
    """
    asked = headers.get("host", "")
    if not _own_host(asked, host, port):
        return 421, f"this page is at its own address only, port {port} of {host}, not at {asked[:80]!r}"
    origin = headers.get("origin")
    elsewhere = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none") and path != "/"
    if elsewhere or (origin is not None and origin != f"http://{asked}"):
        return 403, "requests from other sites are refused"
    if method not in SAFE and origin is None:
        return 403, "what changes something must come from the page: its header Origin is missing"
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if method not in SAFE and kind != "application/json":
        return 415, "what changes something is sent as application/json"
    return None


def _own_host(asked: str, host: str, port: int) -> bool:
    name, colon, number = asked.rpartition(":")
    if not colon or number != str(port):
        return port == 80 and not colon and _own_name(asked, host)
    return _own_name(name, host)


def _own_name(name: str, host: str) -> bool:
    if name.lower() in ("localhost", host.lower()):
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    # One that listens at this machine alone is asked at such an address.
    return address.is_loopback or host not in ("127.0.0.1", "::1", "localhost")


class Access:
    """Lets requests of the page through, with its headers on every answer; those of `beside` are not its business."""

    def __init__(self, app: Any, where: Callable[[], tuple[str, int]], beside: tuple[str, ...] = ()) -> None:
        self.app, self._where, self._beside = app, where, beside

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """An ASGI application around another one."""
        path = scope.get("path", "")
        if scope["type"] != "http" or any(path == each or path.startswith(f"{each}/") for each in self._beside):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in more if pair[0] not in own)]
            await send(message)

        reason = refused(scope["method"], path, headers, *self._where())
        if reason is None:
            await self.app(scope, receive, sent)
            return
        from fastapi.responses import JSONResponse  # noqa: PLC0415 - in the extra serve

        await JSONResponse({"error": reason[1]}, reason[0])(scope, receive, sent)
