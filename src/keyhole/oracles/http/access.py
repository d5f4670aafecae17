"""How a server is reached: time limits, repetitions, a token, certificates and a proxy."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from keyhole.errors import UsageError
from keyhole.oracles.http.connections import Connections
from keyhole.oracles.http.retries import Exchange

NAME = re.compile(r"[A-Za-z0-9_-]+")  # of a header
LOOPBACK = ("localhost", "127.0.0.1", "::1")
PROXIES = ("http", "https", "socks4", "socks4a", "socks5", "socks5h")
NO_PROXY = "none"  # what proxy= says where none is to be used, whatever the environment names
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")  # beside SSL_CERT_FILE, which the ssl module reads itself


@dataclass(frozen=True, kw_only=True)
class Access:
    """Options that oracles behind a server share; UsageError where one makes no sense."""

    connections: int = 4
    timeout: float = 30.0
    retries: int = 5
    patience: float = 300.0
    token_env: str | None = None
    header: str = "Authorization"
    headers: Mapping[str, str] = field(default_factory=dict)
    ca: str | None = None
    proxy: str | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "patience"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
                raise UsageError(f"{name} must be a positive number of seconds, not {number!r}")
        check_whole("connections", self.connections, 1)
        check_whole("retries", self.retries, 0)

    def exchange(self, url: str) -> Exchange:
        """Requests to the server of an address."""
        secret = _secret(self.token_env, url)
        bearer = f"Bearer {secret}" if self.header.lower() == "authorization" else secret
        headers = {**self.headers, **({} if bearer is None else {self.header: bearer})}
        for name, text in headers.items():
            if not (NAME.fullmatch(name) and text.isascii() and text.isprintable()):
                raise UsageError(f"the header {name!r} holds a line break or another unusual character")
        ca = self.ca or next(filter(None, map(os.environ.get, CERTIFICATES)), None)
        return Exchange(
            Connections(self.timeout, ca, _proxy(self.proxy, url)),
            retries=self.retries,
            patience=self.patience,
            headers=headers,
            secret=secret,
        )


def check_whole(name: str, number: object, least: int) -> None:
    """UsageError unless it is a whole number of at least `least`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UsageError(f"{name} must be a whole number of at least {least}, not {number!r}")


def check_address(url: str, example: str) -> None:
    """UsageError where a text is no address, or holds a password."""
    try:
        parts = urlsplit(url)
        _ = parts.hostname, parts.port  # the port raises where it is no number
    except ValueError as error:
        raise UsageError(f"{url!r} is no address ({error}): write {example}") from error
    if not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is no address: what is not ASCII, and spaces, must be written as %xx")
    if parts.username is not None or parts.password is not None:
        raise UsageError("an address must not hold a password: name the environment variable of a token, token_env=")


def _secret(token_env: str | None, url: str) -> str | None:
    if token_env is None:
        return None
    secret = os.environ.get(token_env)
    if not secret:
        raise UsageError(
            f"the environment variable {token_env!r} is not set: put the token there, not on a command line"
        )
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in LOOPBACK:
        raise UsageError(f"a token over plain http could be read on the way to {parts.hostname}: use https://")
    if not secret.isascii() or not secret.isprintable():
        raise UsageError(f"the environment variable {token_env!r} holds no token: line breaks or unusual characters")
    return secret


def _proxy(address: str | None, url: str) -> str | None:
    """The proxy on the way to an address: the one given, else the environment's; never for this machine itself."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if address == NO_PROXY:
        return None
    named = f"proxy={address!r}"
    if address is None:
        proxies = getproxies()
        address = proxies.get(parts.scheme) or proxies.get("all")
        named = f"the environment's {parts.scheme}_proxy"
        if not address or host in LOOPBACK or proxy_bypass(f"{host}:{parts.port}" if parts.port else host):
            return None
        address = address if "//" in address else f"http://{address}"
    try:
        at = urlsplit(address)
        if at.scheme in PROXIES and at.hostname and at.path in ("", "/") and at.port != 0:
            return address
    except ValueError:  # the port is no number
        pass
    raise UsageError(f"{named} is no address of a proxy: write http://host:port, or {NO_PROXY} for no proxy")
