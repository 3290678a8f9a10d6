"""A stand-in of the Hugging Face Hub on the loopback address, as far as models are uploaded and downloaded."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER = "lena"
TOKENS = {"hf_writes": "write", "hf_reads": "read"}


class Hub:
    """The models of the stand-in, its address, and the requests that it got."""

    def __init__(self):
        self.models = {}  # by name; a model is {"private", "gated", "commits"}, a commit {path: bytes}
        self.requests = []
        self.server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Bound", (Answers,), {"hub": self})
        )
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def commit_hash(number):
    """The name of the commit of this number, from 0."""
    return hashlib.sha1(str(number).encode()).hexdigest()


class Answers(BaseHTTPRequestHandler):
    """Answers as the Hub does: the same status and headers for the same trouble."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def log_message(self, *args):
        pass

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token and token not in TOKENS:
            return self.refuse(401, message="Invalid credentials in Authorization header")

        if path == "/api/whoami-v2":
            access = {"displayName": "a token", "role": TOKENS[token]}
            return self.send({"name": USER, "orgs": [], "auth": {"accessToken": access}})
        if path == "/api/validate-yaml":
            return self.send({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            return self.create(json.loads(body))

        upload = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if upload:
            return self.upload(*upload.groups(), body)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if file:
            return self.file(token, *file.groups())
        model = re.fullmatch(r"/api/models/([^/]+/[^/]+)", path)
        if model and model[1] in self.hub.models:
            return self.send({"id": model[1]})
        return self.refuse(404, "RepoNotFound")

    def create(self, wish):
        name = f"{wish.get('organization') or USER}/{wish['name']}"
        if name in self.hub.models:
            return self.send({"url": f"{self.hub.address}/{name}"}, status=409)
        if not name.startswith(f"{USER}/"):
            return self.refuse(403, message="You don't have the rights to create a model there")
        private = wish.get("visibility") == "private" or bool(wish.get("private"))
        self.hub.models[name] = {"private": private, "gated": False, "commits": []}
        return self.send({"url": f"{self.hub.address}/{name}"})

    def upload(self, name, kind, body):
        if kind == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return self.send({"files": [{"path": path, **modes} for path in paths]})

        files = {}
        for line in body.decode().splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
        commits = self.hub.models[name]["commits"]
        commits.append({**(commits[-1] if commits else {}), **files})
        oid = commit_hash(len(commits) - 1)
        url = f"{self.hub.address}/{name}/commit/{oid}"
        return self.send({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def file(self, token, name, revision, path):
        model = self.hub.models.get(name)
        if model is None or (model["private"] and not token):
            return self.refuse(404, "RepoNotFound") if token else self.refuse(401)
        if model["gated"]:
            return self.refuse(403, "GatedRepo")
        names = [commit_hash(number) for number in range(len(model["commits"]))]
        if revision not in (*names, "main"):
            return self.refuse(404, "RevisionNotFound")
        number = len(names) - 1 if revision == "main" else names.index(revision)
        if path not in model["commits"][number]:
            return self.refuse(404, "EntryNotFound")
        content = model["commits"][number][path]
        tag = hashlib.sha256(content).hexdigest()
        return self.send_bytes(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": names[number]})

    def refuse(self, status, code=None, message="refused"):
        headers = {"X-Error-Message": message}
        if code:
            headers["X-Error-Code"] = code
        self.send_bytes(status, json.dumps({"error": message}).encode(), headers)

    def send(self, value, status=200):
        self.send_bytes(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send_bytes(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(content)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
