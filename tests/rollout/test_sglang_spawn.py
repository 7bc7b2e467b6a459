"""A server whose processes are spawned, as on GPUs: on a CPU the product forks them (campaign)."""

from __future__ import annotations

import functools
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from megarl.config.rollout import SamplingConfig
from megarl.rollout.sglang import server
from megarl.system.compat import sglang
from tests.models.tiny import save_tiny
from tests.rollout.servers import VOCAB, engine, label, start
from tests.rollout.test_sglang_server import EOS, requests, tokens

pytestmark = [pytest.mark.procs, pytest.mark.wide, pytest.mark.timeout(900), pytest.mark.campaign("servers")]


def spawning(folder: Path) -> Path:
    """Return a copy of the server's program that starts its processes as SGLang does with CUDA.

    Each process that imports the program again leaves a file `PID.imported` beside it. On a CPU it also needs the
    stand-in for torchvision's operators before SGLang; forked processes have it from the first one.
    """
    copy = shutil.copytree(Path(sglang.__file__).with_name("sglang_server"), folder / "server") / "serve.py"
    again = (
        'if __name__ != "__main__":\n    importlib.import_module("vision_operators")\n'
        '    Path(__file__).with_name(f"{os.getpid()}.imported").touch()\n'
    )
    text = copy.read_text()
    for before, after in (
        ("    fork_processes()\n", ""),
        ("\nlisten_on_one_address()\n", f"\n{again}listen_on_one_address()\n"),
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    copy.write_text(text)
    return copy


def _command(program: Path, python: Path, arguments: list[str]) -> list[str]:
    return [str(python), str(program), *arguments]


def test_spawned_processes_have_every_hook_and_end_with_their_parent(tmp_path, monkeypatch):
    model = tmp_path / "model"
    save_tiny(model, "qwen3", vocab_size=VOCAB, max_position_embeddings=2048)
    found = {}
    for way in ("forked", "spawned"):
        if way == "spawned":
            command = functools.partial(_command, spawning(tmp_path))
            monkeypatch.setattr(server, "server_command", command)
        with start(tmp_path / way, model, tp_size=2, start_timeout_s=600) as fleet:
            label(fleet, 0)
            # Seeds are exact and filters act by token only with the hooks of the schedulers.
            sampling = SamplingConfig(max_new_tokens=16, top_k=20, top_p=0.9)
            found[way] = tokens(engine(fleet).generate(requests(2, 2), sampling, EOS))
            assert (server_log := next((tmp_path / way).rglob("server_0.log")).read_text())
            assert fleet.servers[0].api.api_key not in server_log  # hidden in every process
            (process,) = (child for child in psutil.Process().children() if "serve.py" in " ".join(child.cmdline()))
            children = process.children(recursive=True)
            imported = {int(file.stem) for file in tmp_path.glob("server/*.imported")}
            assert len(imported) == (3 if way == "spawned" else 0)  # two schedulers and a detokenizer
            assert imported <= {child.pid for child in children}
            os.kill(process.pid, signal.SIGKILL)
            _, alive = psutil.wait_procs(children, timeout=60)
            assert alive == []
    assert found["spawned"] == found["forked"]
