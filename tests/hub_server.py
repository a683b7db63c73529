"""A local stand-in for the Hugging Face Hub: repositories in memory, with the requests that `huggingface_hub` makes."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_stand_in"


class Hub:
    """repository -> path -> content, and what was asked for."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.requests: list[str] = []
        self.address = ""

    def commit(self, repository: str) -> str:
        content = sorted((path, data) for path, data in self.files[repository].items())
        return hashlib.sha1(repr(content).encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def missing(self, code: str) -> None:
        self.answer(404, b"{}", X_Error_Code=code)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self.repository("/".join(parts[2:4]), parts[4:])
        elif len(parts) > 4 and parts[2] == "resolve":
            self.file("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self.missing("RepoNotFound")

    def repository(self, name: str, rest: list[str]) -> None:
        if name not in self.hub.files:
            self.missing("RepoNotFound")
        elif rest[:1] == ["revision"] and rest[1] not in ("main", self.hub.commit(name)):
            self.missing("RevisionNotFound")
        elif rest[:1] == ["tree"]:
            files = self.hub.files[name].items()
            self.json([{"type": "file", "path": p, "size": len(d), "oid": digest(d)} for p, d in files])
        else:
            siblings = [{"rfilename": path} for path in self.hub.files[name]]
            facts = {"id": name, "modelId": name, "sha": self.hub.commit(name), "siblings": siblings}
            self.json({**facts, "private": name in self.hub.private, "tags": [], "downloads": 0, "likes": 0})

    def file(self, name: str, path: str) -> None:
        data = self.hub.files.get(name, {}).get(path)
        if data is None:
            self.missing("EntryNotFound")
            return
        self.answer(200, data, ETag=f'"{digest(data)}"', X_Repo_Commit=self.hub.commit(name))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        self.hub.requests.append(f"POST {path}")
        if path == "/api/validate-yaml":
            self.json({"errors": [], "warnings": []})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, b'{"error": "Invalid username or password."}')
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'somebody'}/{asked['name']}"
            self.hub.files.setdefault(name, {})
            if asked.get("private") or asked.get("visibility") == "private":
                self.hub.private.add(name)
            self.json({"url": f"{self.hub.address}/{name}", "id": name})
        elif "/preupload/" in path:
            modes = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.json({"files": modes})
        elif "/commit/" in path:
            name = "/".join(path.strip("/").split("/")[2:4])
            for line in body.decode().splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.hub.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            commit = self.hub.commit(name)
            self.json({"commitUrl": f"{self.hub.address}/{name}/commit/{commit}", "commitOid": commit})
        else:
            self.missing("RepoNotFound")


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def stand_in() -> Iterator[Hub]:
    """Serve on a free port of the loopback interface; `hub.address` is the endpoint."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
