"""Files of checkpoints are compared as they are when they are read."""

import os
from pathlib import Path

from megarl.training import checkpoint
from tests.training.test_checkpoint import _engine, _hashes


def test_what_a_file_system_remembers_of_names_is_not_taken_for_the_files(alone, tmp_path, monkeypatch):
    real = Path.stat

    def remembered(path: Path, **options):
        status = real(path, **options)
        # Size and times, as NFS tells them of a name that another machine has written to since.
        return os.stat_result([*status[:6], 0, *status[7:]]) if path.suffix in (".safetensors", ".json") else status

    engine = _engine("dense", {})
    monkeypatch.setattr(Path, "stat", remembered)
    folder = checkpoint.save(tmp_path, 1, {"actor": engine}, {})
    assert (folder / "state.json").stat().st_size == 0
    before = _hashes(engine)
    other = _engine("dense", {}, seed=77)
    assert checkpoint.load(folder, {"actor": other})[0] == 1
    assert _hashes(other) == before
