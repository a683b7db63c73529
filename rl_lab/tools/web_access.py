"""Who may see a page that the lab serves: one rule for `rl-lab report --serve` and `rl-lab play --web`.

- Bound to loopback and without a token: a request is answered when it comes from this machine, its `Host` header
  names loopback (a foreign name that resolves to 127.0.0.1 is refused), and its `Origin`, where it has one, is the
  page itself (another site's script is refused). Everybody with an account on this machine counts as "this machine".
- Bound to any other address: a token is always needed. It is made when none is given, and printed once as part
  of the address, as notebooks do.
- With a token, on any address: `?token=…` or `Authorization: Bearer …` must carry it, and `Origin`, where there
  is one, must be the page itself.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

from rl_lab.errors import LabError

EVERYWHERE = ("", "0.0.0.0", "::")  # addresses that mean every interface of the machine


def make_token() -> str:
    """A fresh secret: 192 random bits in letters that need no quoting."""
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    """Whether a host name or address, without a port, means this machine only."""
    name = host.strip("[]").lower().rstrip(".")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """The name in a Host header, without its port; "" for a header that is none."""
    try:
        return urlsplit(f"//{header.strip()}").hostname or ""
    except ValueError:
        return ""


class WebAccess:
    """The rule for one served address. `token=None` makes one where the address needs it."""

    def __init__(self, host: str = "127.0.0.1", token: str | None = None) -> None:
        if token is not None and not token.strip():
            raise LabError("the token is empty: leave it out to have one made, or give a long one")
        self.host = host
        self.loopback = is_loopback(host)
        self.token = token if token is not None or self.loopback else make_token()

    def allowed(
        self, headers: Mapping[str, str], query_token: str | None = None, client_host: str = ""
    ) -> bool:
        """Whether to answer a request (or a WebSocket's handshake) with these headers from this client."""
        given = {name.lower(): value for name, value in headers.items()}
        host = given.get("host", "")
        if not same_origin(given.get("origin"), host):
            return False
        if self.token is not None:
            scheme, _, bearer = given.get("authorization", "").partition(" ")
            carried = query_token or (bearer.strip() if scheme.lower() in ("bearer", "token") else "")
            return hmac.compare_digest(carried.encode(), self.token.encode())
        return is_loopback(host_name(host)) and is_loopback(client_host)

    def url(self, port: int) -> str:
        """The address to open, with the token where there is one."""
        name = socket.gethostname() if self.host in EVERYWHERE else self.host
        shown = f"[{name}]" if ":" in name else name
        return f"http://{shown}:{port}/" + (f"?token={quote(self.token, safe='')}" if self.token else "")


def same_origin(origin: str | None, host: str) -> bool:
    """Whether a request's Origin is the page that `host` served; a request without one (no script sent it) passes."""
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.strip().lower() != ""
