from __future__ import annotations

import pytest

from rl_lab.errors import LabError
from rl_lab.tools.web_access import WebAccess, host_name, is_loopback, make_token, page_headers, same_origin

LOCAL = {"Host": "127.0.0.1:8000"}


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.9", "localhost", "LOCALHOST.", "::1", "[::1]"])
def test_loopback(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "", "10.0.0.1", "localhost.evil.example", "127.0.0.1.evil.example", "::"]
)
def test_other_hosts_are_not_loopback(host: str):
    assert not is_loopback(host)


def test_host_headers():
    assert host_name("127.0.0.1:8000") == "127.0.0.1" and host_name("[::1]:80") == "::1"
    assert host_name("[nonsense") == "" and host_name("") == ""


def test_loopback_needs_no_token():
    access = WebAccess("127.0.0.1", None)
    assert access.token is None and access.url(8000) == "http://127.0.0.1:8000/"
    assert access.allowed(LOCAL, None, "127.0.0.1")
    assert access.allowed({"host": "localhost:8000", "origin": "http://localhost:8000"}, None, "::1")


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example:8000"},  # a name that was pointed at 127.0.0.1
        {},
        {**LOCAL, "Origin": "http://evil.example"},
        {**LOCAL, "Origin": "http://127.0.0.1:9999"},  # another page of this machine
        {**LOCAL, "Origin": "null"},
        {**LOCAL, "Origin": "file://127.0.0.1:8000"},
        {**LOCAL, "Origin": "http://[bad"},
    ],
)
def test_other_pages_are_refused(headers: dict[str, str]):
    assert not WebAccess().allowed(headers, None, "127.0.0.1")


def test_remote_client_is_refused():
    assert not WebAccess().allowed(LOCAL, None, "10.0.0.7")


def test_other_addresses_get_token():
    access = WebAccess("0.0.0.0")
    assert access.token and len(access.token) >= 32
    assert access.url(80).endswith(f"/?token={access.token}") and "0.0.0.0" not in access.url(80)
    headers = {"Host": "lab.example:8000"}
    assert access.allowed(headers, access.token, "10.0.0.7")
    assert access.allowed({**headers, "Authorization": f"Bearer {access.token}"}, None, "10.0.0.7")
    assert access.allowed({**headers, "Origin": "http://lab.example:8000"}, access.token, "10.0.0.7")
    for token in (None, "", "wrong", access.token + "x", access.token[:-1], "ü"):
        assert not access.allowed(headers, token, "10.0.0.7")
        assert not access.allowed(headers, token, "127.0.0.1"), "from this machine too"
    assert not access.allowed({**headers, "Origin": "http://evil.example"}, access.token, "10.0.0.7")
    assert not access.allowed({**headers, "Authorization": f"Basic {access.token}"}, None, "10.0.0.7")


def test_own_token():
    access = WebAccess("127.0.0.1", "a b&c")
    assert access.url(1) == "http://127.0.0.1:1/?token=a%20b%26c"
    assert access.allowed(LOCAL, "a b&c", "127.0.0.1") and not access.allowed(LOCAL, None, "127.0.0.1")
    with pytest.raises(LabError, match="empty"):
        WebAccess("0.0.0.0", " ")
    assert make_token() != make_token()
    assert WebAccess("::1").url(5) == "http://[::1]:5/"


def test_origins():
    assert same_origin(None, "a:1") and same_origin("https://A:1", "a:1")
    assert not same_origin("http://a", "a:1") and not same_origin("http://", "")


def test_token_moves_from_the_address_to_a_cookie():
    access = WebAccess("0.0.0.0")
    token, browser = access.token or "", {"Host": "lab.example:80", "Accept": "text/html,*/*"}
    moved = access.redirect(browser, "/", token)
    assert moved is not None and moved["Location"] == "/" and token not in moved["Set-Cookie"]
    assert "HttpOnly" in moved["Set-Cookie"] and "SameSite=Lax" in moved["Set-Cookie"]
    cookie = moved["Set-Cookie"].partition(";")[0]
    assert access.allowed({"Host": "lab.example:80", "Cookie": f"other=1; {cookie}"}, None, "10.0.0.7")
    name, _, value = cookie.partition("=")
    for wrong in (f"{name}=", f"{name}={value}x", f"other={value}", "", "ü"):
        assert not access.allowed({"Host": "lab.example:80", "Cookie": wrong}, None, "10.0.0.7")
    assert not WebAccess("0.0.0.0").allowed({"Host": "lab.example:80", "Cookie": cookie}, None, "10.0.0.7")
    assert access.redirect(browser, "/", "wrong") is None and access.redirect(browser, "/", None) is None
    assert access.redirect({"Host": "lab.example:80", "Accept": "*/*"}, "/", token) is None, "a program"
    assert WebAccess().redirect(browser, "/", "x") is None, "loopback needs no token"


@pytest.mark.parametrize(
    ("site", "mode", "destination", "allowed"),
    [
        ("same-origin", "cors", "empty", True),
        ("none", "navigate", "document", True),  # typed, or a bookmark
        ("cross-site", "navigate", "document", True),  # a link on another page
        ("cross-site", "no-cors", "image", False),
        ("same-site", "no-cors", "image", False),  # another port of this machine
        ("cross-site", "navigate", "iframe", False),
        ("cross-site", "websocket", "empty", False),
    ],
)
def test_what_other_sites_embed_is_refused(site: str, mode: str, destination: str, allowed: bool):
    fetch = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": destination}
    assert WebAccess().allowed({**LOCAL, **fetch}, None, "127.0.0.1") == allowed


def test_short_tokens_are_refused_where_others_can_guess(monkeypatch):
    with pytest.raises(LabError, match="fewer than 16 letters"):
        WebAccess("0.0.0.0", "abc")
    assert WebAccess("127.0.0.1", "abc").token == "abc"
    monkeypatch.setenv("RL_LAB_TOKEN", "from-the-environment")
    assert WebAccess("0.0.0.0").token == "from-the-environment"
    assert WebAccess("0.0.0.0", "from-the-command-line").token == "from-the-command-line"


def test_headers_of_every_answer():
    headers = page_headers("abc", "lab.example:80")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'nonce-abc'" in policy
    assert "connect-src 'self' ws://lab.example:80 wss://lab.example:80;" in policy
    assert "frame-ancestors 'none'" in policy and headers["X-Frame-Options"] == "DENY"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "script-src 'none'" in page_headers()["Content-Security-Policy"]
    for odd in ("evil; script-src *", "a b", "x\r\nSet-Cookie: y", "ü"):
        assert odd not in page_headers("abc", odd)["Content-Security-Policy"]
