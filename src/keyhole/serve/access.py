"""Who may ask a server on this machine: no page of another site, and nobody by a name that somebody else gave it."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keyhole.oracles.http.access import LOOPBACK
from keyhole.serve.served_oracle import Refusal

# What is to be done about a request: the path, its headers by lower-case name; raises Refusal.
Judge = Callable[[str, str, Mapping[str, str]], None]


def is_own_host(asked: str, host: str, port: int) -> bool:
    """Whether the header Host names a server that listens at this host and port.

    A name that somebody else's server resolves to this machine shows there (DNS rebinding). Numeric addresses and
    localhost cannot be made to mean another machine.
    """
    name, colon, number = asked.rpartition(":")
    if not colon or number != str(port):
        return port == 80 and not colon and _is_own_name(asked, host)
    return _is_own_name(name, host)


def _is_own_name(name: str, host: str) -> bool:
    if name.lower() in ("localhost", host.lower()):
        return True
    try:
        address = ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    # One that listens at this machine alone is asked at such an address.
    return address.is_loopback or host not in LOOPBACK


def check_client(headers: Mapping[str, str], host: str, port: int, names: Sequence[str] = ()) -> None:
    """Refuse a request that came by a foreign name, none of `names`, or from a page of another site."""
    asked = headers.get("host", "")
    name = asked.rpartition(":")[0] if asked.rpartition(":")[2].isdecimal() else asked
    if name.lower() not in {each.lower() for each in names} and not is_own_host(asked, host, port):
        known = "" if host in LOOPBACK else "; keyhole serve --allow-host NAME allows a name"
        raise Refusal(421, f"this server is at port {port} of {host}, not at {asked[:80]!r}{known}")
    origin = headers.get("origin")
    elsewhere = headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none")
    if elsewhere or (origin is not None and origin not in (f"http://{asked}", f"https://{asked}")):
        raise Refusal(403, "requests from pages of other sites are refused")


class Guard:
    """An ASGI application that asks a judge before it lets a request through to another one."""

    def __init__(self, app: Any, judge: Judge, added: Mapping[str, str] | None = None) -> None:
        self.app, self.judge = app, judge
        self._added = [(name.lower().encode(), value.encode()) for name, value in (added or {}).items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Judge by path and headers; what is let through gets the headers that are added to every answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], *(pair for pair in self._added if pair[0] not in own)]
            await send(message)

        try:
            self.judge(scope["method"], scope.get("path", ""), headers)
        except Refusal as refusal:
            from fastapi.responses import JSONResponse  # noqa: PLC0415 - in the extra serve

            await JSONResponse({"error": str(refusal)}, refusal.status)(scope, receive, sent)
            return
        await self.app(scope, receive, sent)
