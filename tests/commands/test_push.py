"""`megarl convert --push-to-hub`: what huggingface_hub asks a small server for, the model card, and failures."""

from __future__ import annotations

import base64
import http.server
import json
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from megarl.cli import main
from megarl.commands.push import check_push, push, write_card
from megarl.system.credentials import mask_argument
from megarl.system.errors import ConfigError, MegarlError
from tests.models.tiny import save_tiny

TOKEN = "hf_only_in_a_header"


class Hub(http.server.ThreadingHTTPServer):
    """The part of the hub's protocol that an upload of small files needs. `refuses`: the status of a commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.private: bool | None = None  # of the repository; None: it is missing
        self.files: dict[str, bytes] = {}
        self.tokens: set[str | None] = set()
        self.refuses: int | None = None


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path != "/api/models/me/model":
            return self._answer({"error": "Repository not found"}, 404)
        return self._answer({"id": "me/model", "private": self.server.private, "siblings": [], "sha": "0" * 40})

    def do_POST(self) -> None:
        self.server.tokens.add(self.headers["Authorization"])
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path.startswith("/api/models/") and not self.path.startswith("/api/models/me/model/"):
            return self._answer({"error": "Repository not found"}, 404)
        if self.path == "/api/repos/create":
            url = f"{constants.ENDPOINT}/me/model"
            asked = json.loads(body)
            if self.server.private is None:
                public = asked.get("visibility") == "public" or asked.get("private") is False
                self.server.private = not public
                return self._answer({"url": url})
            return self._answer({"error": "exists", "url": url}, 409)
        if self.path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            return self._answer({"files": [{**file, "shouldIgnore": False} for file in files]})
        if "/commit/" in self.path:
            if self.server.refuses is not None:
                return self._answer({"error": "no"}, self.server.refuses)
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self._answer({"commitUrl": "https://huggingface.co/me/model/commit/0", "commitOid": "0" * 40})
        return self._answer({})  # the check of the card's header

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a recipe with secrets, with an export."""
    folder = tmp_path / "run"
    folder.mkdir()
    config = {
        "model": {"path": "org/base"},
        "data": {"train_files": ["org/rows@train", "megarl.recipes.arithmetic:make_rows"]},
        "reward": {
            "name": "http",
            "kwargs": {"api_key": "sk-1", "pem_secret": "sk-1\nsk-1\n", "url": "http://me:word@host/score"},
        },
    }
    words = ["my.yaml", "reward.kwargs={api_key: sk-1, args: [--api-key, sk-1]}", f"trainer.dir={Path.home()}/runs"]
    command = shlex.join(["megarl", "train", *map(mask_argument, words)])
    (folder / "run.json").write_text(json.dumps({"name": "sums", "config": config, "command": command}))
    lines = [{"step": step, "stage": "train", "val/acc": step / 20, "timing_s/step": 1.0} for step in (0, 10)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    save_tiny(folder / "hf", "llama")
    return folder


def test_an_export_is_uploaded_with_its_card_to_a_private_repository(hub, run, tmp_path, capsys):
    target = tmp_path / "out"
    assert main(["convert", str(run / "hf"), str(target), "--push-to-hub", "me/model"]) == 0
    assert hub.private is True
    assert hub.files == {file.name: file.read_bytes() for file in target.iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= hub.files.keys()
    assert hub.tokens == {f"Bearer {TOKEN}"}
    shown = capsys.readouterr()
    assert "me/model" in shown.out
    assert TOKEN not in shown.out + shown.err + hub.files["README.md"].decode()


def test_a_card_has_metrics_recipe_command_and_no_secret(run, tmp_path):
    write_card(tmp_path, run / "hf")
    card = (tmp_path / "README.md").read_text()
    head = card.split("---\n")[1]
    assert "base_model: org/base\n" in head
    assert "- org/rows\n" in head
    assert "| `val/acc` | 0.5 | 10 |" in card
    assert "timing" not in card
    assert "megarl train my.yaml" in card
    assert "trainer.dir=~/runs" in card
    assert yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])["reward"]["kwargs"]["pem_secret"] == "***"
    assert not [secret for secret in ("sk-1", "word@") if secret in card]
    write_card(tmp_path, tmp_path / "elsewhere")
    assert "## Recipe" not in (tmp_path / "README.md").read_text()


def test_a_home_that_is_the_root_stays(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/")
    write_card(tmp_path, run / "hf")
    assert "`org/rows@train`" in (tmp_path / "README.md").read_text()


def test_a_name_without_a_user_is_the_users_own(hub, run):
    assert push(run / "hf", "model") == f"{constants.ENDPOINT}/me/model"
    assert "config.json" in hub.files


def test_a_failed_upload_says_how_to_repeat_it(hub, run):
    hub.refuses = 403
    with pytest.raises(MegarlError, match="403") as error:
        push(run / "hf", "me/model")
    assert f"hf upload me/model {run / 'hf'} . --private" in str(error.value)
    assert TOKEN not in str(error.value)
    assert (run / "hf" / "model.safetensors").is_file()


def test_a_public_repository_is_not_written_unasked(hub, run):
    hub.private = False
    with pytest.raises(MegarlError, match="exists and is public"):
        push(run / "hf", "me/model")
    assert hub.files == {}
    push(run / "hf", "me/model", public=True)
    assert "config.json" in hub.files


def test_what_cannot_work_is_refused_before_the_conversion(monkeypatch, tmp_path, hub):
    with pytest.raises(ConfigError, match="the repository name is invalid"):
        check_push("me/my/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="switched off"):
        check_push("me/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with pytest.raises(ConfigError, match="hf auth login"):
        check_push("me/model")
