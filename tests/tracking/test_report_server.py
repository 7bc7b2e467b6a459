"""The served report: for this machine only, and with what a run has written since."""

import json
import threading
import urllib.error
import urllib.request

import pytest

from megarl.artifacts.jsonl import JsonlWriter
from megarl.artifacts.profiles import profile_file
from megarl.system.errors import ConfigError, DataError
from megarl.tracking.report_server import ReportServer
from tests.tracking.browser import BROWSER, open_page
from tests.tracking.test_report import make_run, page_data


@pytest.fixture
def served(tmp_path):
    """A server of a run of five steps that is under way."""
    make_run(tmp_path)
    with ReportServer([tmp_path], 0, period_s=0.2) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(address, **headers):
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
        return answer.status, answer.read().decode()


def log_step(folder, step):
    writer = JsonlWriter(folder / "metrics.jsonl", durable=False)
    writer.write({"step": step, "stage": "train", "time": 0.0, "critic/score/mean": 0.5})
    writer.close()


def test_data_come_again_when_the_run_has_gone_on(served):
    status, page = get(served.address)
    tag = page_data(page)["live"]["tag"]
    assert status == 200
    assert get(f"{served.address}data?tag={tag}") == (204, "")
    log_step(served.folders[0], 6)
    status, text = get(f"{served.address}data?tag={tag}")
    assert status == 200
    assert json.loads(text)["groups"][0]["charts"][0]["range"] == [1, 6]
    assert json.loads(text)["live"]["tag"] != tag


def test_files_of_the_profiler_are_linked_and_served(served):
    file = profile_file(served.folders[0], 3, 0)
    file.parent.mkdir()
    file.write_text("a trace")
    (file.parent / "secret.json.gz").write_text("another file")
    _, page = get(served.address)
    assert page_data(page)["profiles"] == ["profile/step_3_rank_0.json.gz"]
    assert get(f"{served.address}profile/step_3_rank_0.json.gz") == (200, "a trace")
    for path in ("profile/secret.json.gz", "profile/../run.json"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(served.address + path)


@pytest.mark.parametrize(("path", "host", "status"), [("", "evil.example:80", 403), ("other", "localhost:1", 404)])
def test_other_names_and_other_paths_get_nothing(served, path, host, status):
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(served.address + path, Host=host)
    assert refused.value.code == status


def test_a_run_that_cannot_be_read_any_more_is_said_so(served):
    (served.folders[0] / "metrics.jsonl").unlink()
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(f"{served.address}data?tag=0")
    assert refused.value.code == 500
    assert "no metrics.jsonl" in refused.value.read().decode()


def test_only_this_machine_is_listened_to(served):
    assert served.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken_and_a_folder_without_a_run_are_refused(served, tmp_path):
    with pytest.raises(ConfigError, match="the port is already in use"):
        ReportServer([tmp_path], served.server_address[1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"no metrics\.jsonl"):
        ReportServer([tmp_path / "empty"], 0)


@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium-headless-shell")
def test_a_page_follows_the_run_and_keeps_its_zoom(served):
    with open_page() as page:
        page.show(served.address, 1400)
        page.value("zoom('train', [2, 4])")
        log_step(served.folders[0], 6)
        page.until("DATA.groups[0].charts[0].range[1] === 6")
        assert page.value("state.zoom.train") == [2, 4]
        kind = "document.getElementById('kind').textContent"
        assert "live, as of" in page.value(kind)
        assert page.errors == []
        gone = served.folders[0].rename(served.folders[0].with_name("gone"))
        page.until(f"{kind}.startsWith('no news since')")
        gone.rename(served.folders[0])
        page.until(f"{kind}.includes('live, as of')")
