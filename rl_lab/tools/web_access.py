"""Access control of the pages that `rl-lab report --serve` and `rl-lab play --web` serve.

- Bound to loopback without a token: a request is answered if it comes from this machine, its `Host` header
  names loopback (another name that resolves to 127.0.0.1 is refused), and its `Origin`, if present, is the
  page itself (scripts of other sites are refused). All user accounts of this machine count as "this machine".
- Bound to any other address: a token is required. It is generated if none is given, and printed once as part
  of the URL, as notebooks do.
- With a token, on any address: the request must have it in `?token=…` or `Authorization: Bearer …`, and
  `Origin`, if present, must be the page itself.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from rl_lab.errors import LabError

ALL_INTERFACES = ("", "0.0.0.0", "::")


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
        if token is not None and not token.strip():
            raise LabError("--token is empty: leave it out to generate one, or give a long one")
        self.host = host
        self.loopback = is_loopback(host)
        self.token = token if token is not None or self.loopback else make_token()

    def allowed(
        self, headers: Mapping[str, str], query_token: str | None = None, client_host: str = ""
    ) -> bool:
        """Return whether to answer a request (or WebSocket handshake) with these headers from this client."""
        given = {name.lower(): value for name, value in headers.items()}
        host = given.get("host", "")
        if not same_origin(given.get("origin"), host):
            return False
        if self.token is not None:
            scheme, _, bearer = given.get("authorization", "").partition(" ")
            sent = query_token or (bearer.strip() if scheme.lower() in ("bearer", "token") else "")
            return hmac.compare_digest(sent.encode(), self.token.encode())
        return is_loopback(host_name(host)) and is_loopback(client_host)

    def url(self, port: int) -> str:
        """Return the URL to open, with the token if there is one."""
        name = socket.gethostname() if self.host in ALL_INTERFACES else self.host
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")


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
