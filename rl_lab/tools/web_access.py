"""The rules of every page that a verb serves: who gets an answer, with which headers, and within which limits.

`rl-lab report --serve` and `rl-lab play --web` use this module, and so should every page to come.

- Bound to loopback without a token: a request is answered if it comes from this machine, its `Host` header
  names loopback (another name that resolves to 127.0.0.1 is refused), and its `Origin`, if present, is the
  page itself (scripts of other sites are refused). All user accounts of this machine count as "this machine".
- Bound to any other address: a token is required. It is generated if none is given, and printed once as part
  of the URL, as notebooks do. RL_LAB_TOKEN sets one without showing it in the list of processes.
- With a token, on any address: the request must have it in `?token=…`, in `Authorization: Bearer …`, or the
  cookie that the first visit set. A browser that opens the printed URL is sent on to one without the token, so
  that it is in no history, no screenshot and no link.
- A browser says where a request comes from (`Sec-Fetch-Site`): images and scripts that another site embeds
  are refused, links to the page are not.
- Every answer, a refusal too, has the headers of `page_headers`.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from rl_lab.errors import LabError

ALL_INTERFACES = ("", "0.0.0.0", "::")
TOKEN_VARIABLE = "RL_LAB_TOKEN"
SHORTEST_TOKEN = 16  # letters of a token of one's own where other machines can guess
REFUSED = (
    "A token is required: open the link that the command printed. Or the request came from another page.\n"
)

# Limits of every server.
LARGEST_MESSAGE = 64 * 1024  # bytes of a request line, a header, or a message to a WebSocket
MOST_CONNECTIONS = 64  # at a time; more are closed at once
IDLE_S = 30.0  # for a client to read or to send the next bytes
LONGEST_REQUEST_S = 20.0  # to send all headers
LONGEST_ANSWER_S = 600.0  # to read everything


def page_headers(nonce: str = "", host: str = "") -> dict[str, str]:
    """Return the headers of an answer.

    nonce: of the page's own scripts; without one none may run
    host:  the request's `Host`, so that older browsers allow the page its own WebSocket
    """
    scripts = f"'nonce-{nonce}'" if nonce else "'none'"
    own = f" ws://{host} wss://{host}" if re.fullmatch(r"[A-Za-z0-9.:\[\]-]+", host) else ""
    return {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src 'self' blob: data:; "
            f"media-src 'self' data:; connect-src 'self'{own}; base-uri 'none'; form-action 'none'; "
            "frame-ancestors 'none'"
        ),
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
        "Cache-Control": "no-store",
    }


def make_nonce() -> str:
    return secrets.token_urlsafe(12)


def make_token() -> str:
    """Generate a token of 192 random bits in URL-safe letters."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address (without port) is a loopback address."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Return the name in a Host header without the port; "" for an invalid header."""
    try:
        return urlsplit(f"//{header.strip()}").hostname or ""
    except ValueError:
        return ""


class WebAccess:
    """Access check for one served address. `token=None` generates a token if the address needs one."""

    def __init__(self, host: str = "127.0.0.1", token: str | None = None) -> None:
        if token is None:
            token = os.environ.get(TOKEN_VARIABLE) or None
        if token is not None and not token.strip():
            raise LabError("--token is empty: leave it out to generate one, or give a long one")
        self.host = host
        self.loopback = is_loopback(host)
        if token is not None and not self.loopback and len(token.strip()) < SHORTEST_TOKEN:
            raise LabError(
                f"--token has fewer than {SHORTEST_TOKEN} letters, and other machines can try many: leave it out to "
                "generate one, or give a longer one"
            )
        self.token = token if token is not None or self.loopback else make_token()
        # The cookie shows that the browser had the token, and does not contain it. Cookies are sent to all ports
        # of a machine, so its name differs between servers.
        proof = hmac.new((self.token or "").encode(), b"cookie", "sha256").hexdigest()
        self._cookie_name, self._cookie = f"rl_lab_{proof[:8]}", proof[8:]

    def allowed(
        self, headers: Mapping[str, str], query_token: str | None = None, client_host: str = ""
    ) -> bool:
        """Return whether to answer a request (or WebSocket handshake) with these headers from this client."""
        given = {name.lower(): value for name, value in headers.items()}
        host = given.get("host", "")
        if not same_origin(given.get("origin"), host) or not _own_or_link(given):
            return False
        if self.token is not None:
            return self._has_cookie(given) or self._has_token(given, query_token)
        return is_loopback(host_name(host)) and is_loopback(client_host)

    def redirect(
        self, headers: Mapping[str, str], path: str, query_token: str | None
    ) -> dict[str, str] | None:
        """Return the headers of a redirect (303) that moves the token from the address to a cookie, or None.

        Call it for an allowed GET of a page. Programs, which keep no cookies, get the page itself.
        """
        given = {name.lower(): value for name, value in headers.items()}
        opened = given.get("sec-fetch-mode", "navigate") == "navigate" and "text/html" in given.get(
            "accept", ""
        )
        if not query_token or not opened or not self._has_token({}, query_token):
            return None
        cookie = f"{self._cookie_name}={self._cookie}; HttpOnly; SameSite=Lax; Path=/"
        return {"Location": path, "Set-Cookie": cookie}

    def _has_token(self, given: Mapping[str, str], query_token: str | None) -> bool:
        scheme, _, bearer = given.get("authorization", "").partition(" ")
        sent = query_token or (bearer.strip() if scheme.lower() in ("bearer", "token") else "")
        return hmac.compare_digest(sent.encode(errors="replace"), (self.token or "").encode())

    def _has_cookie(self, given: Mapping[str, str]) -> bool:
        pairs = (pair.strip().partition("=") for pair in given.get("cookie", "").split(";"))
        sent = next((value for name, _, value in pairs if name == self._cookie_name), "")
        return hmac.compare_digest(sent.encode(errors="replace"), self._cookie.encode())

    def url(self, port: int) -> str:
        """Return the URL to open, with the token if there is one."""
        name = socket.gethostname() if self.host in ALL_INTERFACES else self.host
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")


def _own_or_link(given: Mapping[str, str]) -> bool:
    """Return whether a request comes from the page itself, from a person, or is a link that was followed."""
    if given.get("sec-fetch-site", "none") in ("none", "same-origin"):  # older browsers do not send it
        return True
    return given.get("sec-fetch-mode") == "navigate" and given.get("sec-fetch-dest") == "document"


def same_origin(origin: str | None, host: str) -> bool:
    """Return whether a request's Origin is the page that `host` served.

    True without an Origin (no script sent it).
    """
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.strip().lower() != ""
