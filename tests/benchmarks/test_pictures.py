"""The benchmark of pictures runs."""

from megarl.benchmarks import pictures


def test_every_case_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(pictures, "ROUNDS", 0)
    monkeypatch.setattr(pictures.torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(pictures, "cases", lambda: {"none": lambda frames: frames})
    assert pictures.main(["--frames", "1"]) == 0
    assert "none" in capsys.readouterr().out
