from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync import client as sync_client

from rl_lab.tools.play.clients import decode_frame, encode_frame, encode_image
from rl_lab.tools.play.commands import COMMANDS
from rl_lab.tools.play.session import PlaySession
from rl_lab.tools.play.web import bind, make_app, make_server
from rl_lab.tools.web_access import WebAccess

Serve = Callable[..., "Site"]


class Site:
    """A served session and ways to talk to it."""

    def __init__(self, session: PlaySession, port: int, query: str) -> None:
        self.session = session
        self.port = port
        self.query = query

    def get(self, path: str, **headers: str) -> tuple[int, bytes, Any]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, error.read(), error.headers

    def page(self, **headers: str) -> Page:
        socket = sync_client.connect(
            f"ws://127.0.0.1:{self.port}/live{self.query}", additional_headers=headers, open_timeout=20
        )
        return Page(socket)


class Page:
    """What a browser's page does."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.status: dict[str, Any] = {}
        self.head: dict[str, Any] = {}
        self.images: list[bytes] = []
        self._id = 0

    def send(self, do: str, value: Any = None) -> int:
        self._id += 1
        self.socket.send(json.dumps({"do": do, "value": value, "id": self._id}))
        return self._id

    def until(self, true: Callable[[Page], bool], seconds: float = 20.0) -> Page:
        """Receive until something holds."""
        limit = time.monotonic() + seconds
        while not (self.status and self.head and true(self)):
            message = self.socket.recv(timeout=max(0.01, limit - time.monotonic()))
            if isinstance(message, str):
                self.status = json.loads(message)
            else:
                self.head, self.images = decode_frame(message)
        return self

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def serve(make_session: Callable[..., PlaySession], tmp_path: Path) -> Iterator[Serve]:
    """serve(host=…, token=…, **options of the session) -> Site."""
    started = []

    def start(host: str = "127.0.0.1", token: str | None = None, **options: Any) -> Site:
        session = make_session(real_time=True, **options)
        listener = bind("127.0.0.1", 0)
        server = make_server(make_app(session, WebAccess(host, token)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        started.append((server, thread))
        query = f"?token={token}" if token else ""
        site = Site(session, listener.getsockname()[1], query)
        for _ in range(200):
            if server.started:
                break
            time.sleep(0.05)
        return site

    yield start
    for server, thread in started:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_page_is_self_contained(serve: Serve):
    status, html, headers = serve().get("/")
    text = html.decode()
    assert status == 200 and "<canvas" not in text and "createImageBitmap" in text
    addresses = [word for word in ("http://", "https://", "src=", "@import", "url(") if word in text]
    assert (
        addresses == ["http://"] and text.count("http://") == 1
    )  # the icon's XML namespace, which is not fetched
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_play_dream_and_download_recording(serve: Serve):
    site = serve(mode="dream", control="human", ends=None)
    page = site.page().until(lambda p: p.status["steers"])
    assert page.status["mode"] == "dream" and page.status["about"]["experiment"] == "counting"
    for _ in range(50):
        page.send("key_down", "ArrowRight")
        number = page.send("key_up", "ArrowRight")
    page.until(lambda p: p.head["ack"] >= number and p.head["step"] == 50)
    assert dict(page.head["header"])["return"] == "50.000"
    image = np.asarray(Image.open(io.BytesIO(page.images[0])))
    assert image.shape == (8, 8, 3)
    page.send("mode", "both")
    page.until(lambda p: p.status["mode"] == "both" and len(p.images) == 2)
    page.send("record", True)
    page.send("control", "agent")
    page.until(lambda p: p.head["step"] >= 3)
    page.send("record", False)
    page.until(lambda p: len(p.status["files"]) == 2)
    listed = json.loads(site.get("/recordings")[1])
    assert {file["name"] for file in listed} == set(page.status["files"])
    video = next(name for name in page.status["files"] if not name.endswith(".npz"))
    status, data, headers = site.get(f"/recordings/{video}")
    assert status == 200 and len(data) > 500 and "attachment" in headers["Content-Disposition"]
    page.close()


def test_downloads_stay_in_folder(serve: Serve, tmp_path: Path):
    site = serve()
    (tmp_path / "media" / "recordings").mkdir(parents=True, exist_ok=True)
    (tmp_path / "media" / "secret.npz").write_bytes(b"secret")
    (tmp_path / "media" / "recordings" / "notes.txt").write_text("secret")
    for name in ("..%2Fsecret.npz", "../secret.npz", "%2e%2e/secret.npz", "notes.txt", "nothing.mp4", "."):
        status, data, _ = site.get(f"/recordings/{name}")
        assert status in (404, 405) and b"secret" not in data, name


def test_links_and_folders_among_recordings_are_left_out(serve: Serve, tmp_path: Path):
    site, recordings = serve(), tmp_path / "media" / "recordings"
    recordings.mkdir(parents=True, exist_ok=True)
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (recordings / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    (recordings / "folder.npz").mkdir()
    (recordings / "<b>\"odd'.npz").write_bytes(b"fine")
    assert [file["name"] for file in json.loads(site.get("/recordings")[1])] == ["<b>\"odd'.npz"]
    for name in ("link.mp4", "folder.npz"):
        assert site.get(f"/recordings/{name}")[0] == 404
    status, data, headers = site.get("/recordings/" + urllib.parse.quote("<b>\"odd'.npz"))
    assert (status, data) == (200, b"fine") and "attachment" in headers["Content-Disposition"]
    (tmp_path / "media").rename(tmp_path / "elsewhere")
    (tmp_path / "media").symlink_to(tmp_path / "elsewhere")
    assert json.loads(site.get("/recordings")[1]) == []


def test_every_answer_has_the_headers_of_pages(serve: Serve):
    site = serve()
    for path, status in (("/", 200), ("/recordings", 200), ("/recordings/x.npz", 404), ("/nothing", 404)):
        found, _, headers = site.get(path)
        assert found == status and headers["X-Frame-Options"] == "DENY", path
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert ("'nonce-" in headers["Content-Security-Policy"]) == (path == "/")
        assert "script-src 'unsafe-inline'" not in headers["Content-Security-Policy"]
    assert site.get("/", **{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"})[0] == 403
    assert site.get("/", Host="127.1")[0] == 403
    first, second = (site.get("/")[2]["Content-Security-Policy"] for _ in range(2))
    assert first != second, "a nonce is used once"


def test_browser_is_sent_on_without_the_token(serve: Serve):
    site = serve(host="0.0.0.0", token="a-long-secret-of-mine")
    connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=20)
    connection.request("GET", "/?token=a-long-secret-of-mine", headers={"Accept": "text/html"})
    answer = connection.getresponse()
    answer.read()
    assert answer.status == 303 and answer.headers["Location"] == "/"
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    assert b"canvas" in site.get("/", Cookie=cookie)[1] and site.get("/recordings", Cookie=cookie)[0] == 200
    socket = sync_client.connect(f"ws://127.0.0.1:{site.port}/live", additional_headers={"Cookie": cookie})
    Page(socket).until(lambda p: p.status["steers"]).close()
    connection.close()


def test_second_page_only_watches(serve: Serve):
    site = serve(mode="dream", control="human", ends=None)
    first = site.page().until(lambda p: p.status["steers"])
    second = site.page().until(lambda p: p.status["viewers"] == 2)
    assert not second.status["steers"] and not second.status["free"]
    second.send("key_down", "ArrowUp")
    second.send("mode", "real")
    second.socket.send(json.dumps({"do": "take"}))
    first.send("key_down", "ArrowRight")
    second.until(lambda p: p.head["step"] == 1)
    assert dict(second.head["header"])["action"] == "one" and second.status["mode"] == "dream"
    first.close()
    second.until(lambda p: p.status["free"] and p.status["viewers"] == 1)
    second.socket.send(json.dumps({"do": "take"}))
    second.until(lambda p: p.status["steers"])
    second.send("key_down", "ArrowUp")
    second.until(lambda p: p.head["step"] == 2)
    assert dict(second.head["header"])["action"] == "two"
    second.close()


def test_closing_page_frees_controls(serve: Serve):
    site = serve(control="agent", fps=60, last=10**6)
    first = site.page().until(lambda p: p.head["step"] > 2)
    first.send("record", True)
    first.until(lambda p: p.status["recording"])
    first.close()
    limit, stood = time.monotonic() + 20, -1
    while site.session.step != stood and time.monotonic() < limit:  # the server notices that the page is gone
        stood = site.session.step
        time.sleep(0.4)
    assert site.session.step == stood  # without pages the session pauses
    second = site.page().until(lambda p: p.status["steers"])  # and the controls are free
    assert not second.status["recording"] and len(second.status["files"]) == 2  # what was recorded is kept
    second.until(lambda p: p.head["step"] > stood)
    second.close()


MESSAGES = st.one_of(
    st.text(max_size=60),
    st.binary(max_size=60),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ).map(json.dumps),
    st.fixed_dictionaries(
        {"do": st.sampled_from([*COMMANDS, "take", "__class__", ""])},
        optional={
            "value": st.one_of(
                st.none(),
                st.booleans(),
                st.floats(),
                st.integers(),
                st.text(max_size=20),
                st.sampled_from(
                    ["dream", "both", "episodes", "agent", "human", "Enter", ",", "n", "v", "train"]
                ),
                st.lists(st.integers(), max_size=2),
            ),
            "id": st.one_of(st.none(), st.integers(), st.text(max_size=3)),
        },
    ).map(json.dumps),
)


def test_fuzzed_messages(serve: Serve):
    site = serve(mode="dream", fps=60, save=True)

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(MESSAGES, min_size=5, max_size=25))
    def fuzz(messages: list[str | bytes]) -> None:
        page = site.page()
        with contextlib.suppress(ConnectionClosed):
            for message in messages:
                page.socket.send(message)
        page.close()

    fuzz()
    big = site.page()
    with contextlib.suppress(ConnectionClosed):
        big.socket.send("x" * 1_000_000)  # beyond the limit: this connection ends, and no other
        with pytest.raises(ConnectionClosed):
            while True:
                big.socket.recv(timeout=10)
    page = site.page().until(lambda p: p.status["steers"])
    page.send("release")
    page.send("answer", False)
    page.send("record", False)
    page.send("pause", False)
    page.send("control", "agent")
    page.send("speed", 60)
    page.send("mode", "dream")
    page.send("reset")
    page.until(lambda p: p.status["mode"] == "dream" and not p.status["paused"])
    step = page.head["step"]
    page.until(lambda p: p.head["step"] != step)
    page.close()


def test_other_addresses_require_token(serve: Serve):
    site = serve(host="0.0.0.0", token="a-long-secret-of-mine")
    for path in ("/", "/recordings", "/recordings/x.mp4", "/live", "/?token=wrong", "/?token=", "/nothing"):
        status, data, _ = site.get(path)
        assert status == 403 and b"printed" in data and b"canvas" not in data, path
    for query in ("", "?token=wrong"):
        with pytest.raises(InvalidStatus) as refused:
            sync_client.connect(f"ws://127.0.0.1:{site.port}/live{query}")
        assert refused.value.response.status_code == 403
    assert site.get("/?token=a-long-secret-of-mine")[0] == 200
    assert site.get("/", Authorization="Bearer a-long-secret-of-mine")[0] == 200
    site.page().until(lambda p: p.status["steers"]).close()


def test_token_is_generated_beyond_loopback():
    access = WebAccess("0.0.0.0")
    assert access.token and len(access.token) >= 24 and access.token in access.url(8765)
    assert WebAccess("127.0.0.1").token is None


def test_foreign_origins_are_refused(serve: Serve):
    site = serve()
    own = f"http://127.0.0.1:{site.port}"
    site.page(Origin=own).until(lambda p: p.status["steers"]).close()
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": own.replace("http:", "file:")},
    ):
        with pytest.raises(InvalidStatus):
            site.page(**headers)
        assert site.get("/", **headers)[0] == 403
    assert site.get("/", Host="evil.example")[0] == 403  # a name that was made to point here


def test_failing_model_pauses_session(serve: Serve, monkeypatch, capsys):
    site = serve(mode="dream", control="human", ends=None)
    page = site.page().until(lambda p: p.status["steers"])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(site.session.dream.workflow, "dream_step", fail)
    page.send("key_down", "ArrowUp")
    page.until(lambda p: "out of luck" in p.status["message"])
    assert page.status["paused"]
    monkeypatch.undo()
    page.send("pause", False)
    page.send("key_up", "ArrowUp")
    page.send("key_down", "ArrowUp")
    page.until(lambda p: p.head["step"] == 1)
    page.close()


def test_frame_protocol(make_session: Callable[..., PlaySession]):
    session = make_session(parts=True)
    head, images = decode_frame(encode_frame(session))
    assert [panel["title"] for panel in head["panels"]] == ["environment", "model input", "reconstruction"]
    for panel, image in zip(head["panels"], images):
        assert Image.open(io.BytesIO(image)).size == (panel["width"], panel["height"])
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    kind, data = encode_image(noise)
    assert kind == "image/png" and np.array_equal(np.asarray(Image.open(io.BytesIO(data))), noise)
    assert encode_image(np.zeros((400, 600, 3), np.uint8))[0] == "image/jpeg"


def test_port_in_use():
    from rl_lab.errors import LabError

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    with pytest.raises(LabError, match="cannot serve on"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()


def test_server_leaves_logging_alone() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.close = lambda: stream.close()  # type: ignore[method-assign]
    make_server(lambda scope, receive, send: None)  # type: ignore[arg-type,return-value]
    assert not stream.closed and logging.getLogger("uvicorn.error").level == logging.ERROR
