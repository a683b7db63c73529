"""The live page: updates and access control."""

from __future__ import annotations

import html
import http.client
import json
import os
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl_lab.errors import LabError
from rl_lab.run_folder import RunFolder
from rl_lab.tools.report import page as report_page
from rl_lab.tools.report import serve as report_serve
from rl_lab.tools.report.serve import LiveReport, Server, serve
from rl_lab.tools.web_access import WebAccess
from tests.tools.broken_runs import BREAKAGES, break_run, write_short_metrics

MakeRun = Callable[..., Path]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """served(token=…) -> a server over tmp_path/outputs, at a free port of this machine."""
    servers: list[Server] = []

    def start(host: str = "127.0.0.1", token: str | None = None) -> Server:
        access = WebAccess(host, token)
        live = LiveReport([tmp_path / "outputs"])
        servers.append(Server(live, access, 0))
        threading.Thread(
            target=servers[-1].serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
        server.live.close()


def get(
    server: Server, path: str = "", headers: dict[str, str] | None = None
) -> tuple[int, bytes, dict[str, str]]:
    address = f"http://127.0.0.1:{server.server_address[1]}/{path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=headers or {}), timeout=20
        ) as answer:
            return answer.status, answer.read(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read(), dict(error.headers)


def test_live_page_follows_runs(served, make_run: MakeRun, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(report_page, "LARGEST_EMBEDDED", 100)
    server = served()
    live = server.live
    assert live.refresh() and b"no run below" in get(server)[1]
    run = make_run(lines=12)
    assert live.refresh() and not live.refresh()
    status, page, headers = get(server)
    assert status == 200 and b"dreamer_cartpole" in page and get(server, "version")[1] == b"2"
    assert "'none'" in headers["Content-Security-Policy"] and "no-store" in headers["Cache-Control"]
    # A file too large for the page is linked, and served only under that link.
    (link,) = re.findall(r'href="/(file/[^"]+)"', page.decode())
    assert get(server, link)[1] == (run / "media/episodes/test/eval_episode_000020000.gif").read_bytes()
    assert get(server, "file/9.gif")[0] == 404
    for wrong in ("../../etc/passwd", "file/../config.yaml", str(run / "config.yaml"), "%2e%2e/config.yaml"):
        assert get(server, wrong)[0] == 404
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 21000, "collect/return_mean": 3.0}\n')
    assert live.refresh() and live.version == "3" and b"21,000" in get(server)[1]
    # A deleted or unreadable run does not end the server.
    (run / "config.yaml").write_text("{broken")
    assert live.refresh() and b"could not be drawn" in get(server)[1]
    shutil.rmtree(run)
    assert live.refresh() and b"no run below" in get(server)[1]


def test_state_and_page_of_each_run(served, make_run: MakeRun, tmp_path: Path):
    server = served(token="a secret of the test")
    make_run(lines=12, media=False)
    other = make_run(name="other", lines=5)
    with (other / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 100, "time": 1700000100.0}\n')
    server.live.refresh()
    token = "?token=a+secret+of+the+test"
    for path in ("status", "run/0", "?part=1"):
        assert get(server, path)[0] == 403, path
    status = json.loads(get(server, "status" + token)[1])
    assert status["version"] == server.live.version
    found = {run["number"]: run for run in status["runs"]}
    assert [found[number]["state"] for number in (0, 1)] == ["finished", "crashed"]
    assert "other" in found[1]["label"] and found[1]["folder"] == str(other)
    code, page, headers = get(server, "run/1" + token)
    assert code == 200 and b"<h1>other</h1>" in page and f'data-stamp="{found[1]["stamp"]}"'.encode() in page
    assert re.search(rb'nonce="([^"]+)"', page)[1].decode() in headers["Content-Security-Policy"]
    assert server.live.run_page(1) is server.live.run_page(1), "drawn once"
    # Films are not in the page: they have addresses, and players may ask for parts.
    (name,) = re.findall(rb'<img[^>]* src="/(file/[^"]+)"', page)
    film = next((other / "media").rglob("*.gif")).read_bytes()
    assert get(server, name.decode() + token)[1] == film
    for asked, expected in (
        ("bytes=2-5", film[2:6]),
        ("bytes=-3", film[-3:]),
        (f"bytes=4-{10**9}", film[4:]),
    ):
        code, content, headers = get(server, name.decode() + token, {"Range": asked})
        assert (code, content) == (206, expected) and headers["Content-Range"].endswith(f"/{len(film)}")
    for asked in ("bytes=9-2", f"bytes={10**9}-", "bytes=-", "lines=1-2"):
        assert get(server, name.decode() + token, {"Range": asked})[:2] == (200, film)
    assert get(server, "run/2" + token)[0] == 404 and get(server, "run/x" + token)[0] == 404
    (other / "config.yaml").write_text("{broken")
    assert b"could not be drawn" in get(server, "run/1" + token)[1]


def test_live_page_lists_unreadable_runs(served, make_run: MakeRun, tmp_path: Path):
    write_short_metrics(make_run(name="intact", lines=2, media=False))
    expected = [break_run(write_short_metrics(make_run(how, lines=2, media=False)), how) for how in BREAKAGES]
    server = served()
    assert server.live.refresh()
    page = html.unescape(get(server)[1].decode())
    assert "intact" in page and "could not be plotted" in page and page.count('class="plot"') >= 2
    for how, words in zip(BREAKAGES, expected):
        assert re.search(re.escape(str(tmp_path / "outputs" / how)) + f".*{re.escape(words)}", page), how
    # A fixed run is plotted; the length of the file stays the same.
    config = tmp_path / "outputs" / "broken YAML" / "config.yaml"
    config.write_text("a: 11\n")
    os.utime(config, (1, 1))
    assert server.live.refresh() and b"cannot be read as YAML" not in get(server)[1]


def test_deleted_files_and_broken_links_are_ignored(make_run: MakeRun, tmp_path: Path, monkeypatch):
    run = write_short_metrics(make_run(lines=2))
    (run / "media" / "gone.gif").symlink_to(run / "nothing.gif")
    (tmp_path / "outputs" / "away").symlink_to(tmp_path / "nowhere")
    real_stat, vanished = Path.stat, []

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.name.startswith("eval_episode"):
            vanished.append(path)
            raise FileNotFoundError(path)  # as if it were deleted after it was listed
        return real_stat(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    live = LiveReport([tmp_path / "outputs"])
    assert live.refresh() and vanished and b"dreamer_cartpole" in live.page
    assert b"could not be drawn" not in live.page and b"could not be plotted" not in live.page
    assert not live.refresh()
    live.close()


def test_watch_thread_survives_exceptions(make_run: MakeRun, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(report_serve, "POLL_SECONDS", 0.01)
    polls = threading.Semaphore(0)

    def fail(self: LiveReport) -> list[RunFolder]:
        polls.release()
        raise RecursionError("too deep")

    live = LiveReport([tmp_path / "outputs"])
    with monkeypatch.context() as broken:
        broken.setattr(LiveReport, "runs", fail)
        watcher = threading.Thread(target=live.watch, daemon=True)
        watcher.start()
        assert all(polls.acquire(timeout=20) for _ in range(4))
        assert b"could not be drawn: RecursionError: too deep" in live.page and live.version == "1"
    deadline = time.monotonic() + 20
    while b"no run below" not in live.page and time.monotonic() < deadline:
        time.sleep(0.01)
    assert b"no run below" in live.page
    live.close()
    watcher.join(20)
    assert not watcher.is_alive() and capsys.readouterr().err.count("RecursionError: too deep") == 1


def test_loopback_serves_only_own_page(served):
    server = served()
    assert get(server)[0] == 200
    port = server.server_address[1]
    assert get(server, headers={"Host": "evil.example"})[0] == 403
    assert get(server, headers={"Origin": "http://evil.example"})[0] == 403
    assert get(server, headers={"Origin": f"http://127.0.0.1:{port}"})[0] == 200
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(server.url, method=method)
        with pytest.raises(urllib.error.HTTPError, match="501"):
            urllib.request.urlopen(request, timeout=20)


def test_other_addresses_require_token(served, make_run: MakeRun):
    server = served(host="0.0.0.0")
    token = server.access.token
    assert token and f"?token={token}" in server.url
    for path in ("", "version", "file/0.gif", "?token=wrong", "version?token="):
        status, body, _ = get(server, path)
        assert status == 403 and b"dreamer" not in body and token.encode() not in body
    assert get(server, f"version?token={token}")[0] == 200
    assert get(server, "version", {"Authorization": f"Bearer {token}"})[0] == 200


def test_browser_is_sent_on_without_the_token(served, make_run: MakeRun):
    server = served(host="0.0.0.0")
    token = server.access.token
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.request("GET", f"/?token={token}", headers={"Accept": "text/html"})
    answer = connection.getresponse()
    assert answer.status == 303 and answer.headers["Location"] == "/"
    cookie = {"Cookie": answer.headers["Set-Cookie"].partition(";")[0]}
    assert get(server, "", cookie)[0] == get(server, "version", cookie)[0] == 200
    server.live.refresh()
    assert token.encode() not in server.live.page, "no link has the token"
    connection.close()


def test_clients_that_send_or_read_nothing_are_closed(served, tmp_path: Path, monkeypatch):
    """The others get their answers, and files are not read into memory as a whole."""
    monkeypatch.setattr(report_serve, "LONGEST_REQUEST_S", 0.3)
    monkeypatch.setattr(report_serve, "LONGEST_ANSWER_S", 1.0)
    monkeypatch.setattr(report_serve, "MOST_CONNECTIONS", 3)
    server = served()
    with open(tmp_path / "long.mp4", "wb") as file:
        file.truncate(1 << 33)
    server.live.overview.files["file/0.mp4"] = tmp_path / "long.mp4"
    address = ("127.0.0.1", server.server_address[1])
    slow, stuck = socket.create_connection(address), socket.create_connection(address)
    slow.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\nX: ")
    stuck.sendall(b"GET /file/0.mp4 HTTP/1.0\r\nHost: localhost\r\n\r\n")
    assert get(server)[0] == 200
    limit = time.monotonic() + 20
    while server.deadlines and time.monotonic() < limit:
        time.sleep(0.05)
    assert not server.deadlines and slow.recv(1) == b""
    many = [socket.create_connection(address) for _ in range(8)]
    time.sleep(0.2)
    assert len(server.deadlines) <= 3
    for connection in (slow, stuck, *many):
        connection.close()
    while server.deadlines and time.monotonic() < limit:
        time.sleep(0.05)
    assert get(server)[0] == 200


def test_addresses_that_are_none(served):
    server = served()
    for path in ("//[", "/\x00", "/%00", "/../../etc/passwd", "/" + "a" * 70_000):
        with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
            connection.sendall(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            connection.settimeout(20)
            line = connection.recv(100).split(b"\r\n")[0]
        assert line.split()[1] in (b"400", b"404", b"414"), (path[:20], line)


@pytest.mark.parametrize("how", ["binary code.txt", "dangling link", "odd keys"])
def test_odd_files_cost_the_page_nothing(served, make_run: MakeRun, tmp_path: Path, how: str):
    good = write_short_metrics(make_run("outputs/good"))
    odd = write_short_metrics(make_run("outputs/odd"))
    if how == "binary code.txt":
        (odd / "code.txt").write_bytes(b"\xff\xfe\x00")
    elif how == "dangling link":
        (odd / "media" / "reconstructions").mkdir(parents=True, exist_ok=True)
        (odd / "media" / "reconstructions" / "a.png").symlink_to(tmp_path / "nothing.png")
    else:
        (odd / "config.yaml").write_text("experiment: {1: 2, null: 3}\n4: 5\n")
    server = served()
    assert server.live.refresh()
    assert b"could not be drawn" not in server.live.page and good.name.encode() in server.live.page


def test_watch_thread_draws(make_run: MakeRun, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(report_serve, "POLL_SECONDS", 0.01)
    live = LiveReport([tmp_path / "outputs"])
    watcher = threading.Thread(target=live.watch, daemon=True)
    watcher.start()
    assert live.drawn.wait(20) and b"no run below" in live.page
    live.close()
    watcher.join(20)
    assert not watcher.is_alive()


def test_mistakes_are_said(tmp_path: Path):
    with pytest.raises(LabError, match="no such folder"):
        serve([tmp_path / "nothing"])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LabError, match="another --port"):
            serve([tmp_path], port=taken.getsockname()[1])
