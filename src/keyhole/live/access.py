"""Who may ask the page anything: browsers that show it, and programs on the same machine."""

from __future__ import annotations

from collections.abc import Mapping

from keyhole.serve.access import is_own_host

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
    another site in Origin or Sec-Fetch-Site.
    """
    asked = headers.get("host", "")
    if not is_own_host(asked, host, port):
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
