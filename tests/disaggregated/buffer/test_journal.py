"""Records outlive their writer; what is torn was never there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.disaggregated.buffer.core import StoreError
from megarl.disaggregated.buffer.journal import Journal


def opened(path: Path, of: str = "a") -> tuple[Journal, list[bytes]]:
    journal = Journal(path, of)
    return journal, list(journal.records())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a journal with the records 1, 2 and 3."""
    path = tmp_path / "j"
    journal, found = opened(path)
    assert found == []
    for record in ("1", '["ä"]', "3"):
        journal.append(record)
    assert journal.size == path.stat().st_size
    return path


def test_what_was_appended_is_found_again_and_goes_on(path: Path) -> None:
    journal, found = opened(path)
    assert found == [b"1", '["ä"]'.encode(), b"3"]
    journal.append("4")
    assert opened(path)[1] == [*found, b"4"]


def test_a_torn_end_is_cut_off_wherever_it_is_torn(path: Path) -> None:
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        path.write_bytes(whole[:end])
        journal, found = opened(path)
        assert found == [b"1", '["ä"]'.encode()]
        journal.append("5")
        assert opened(path)[1] == [*found, b"5"]


def test_a_last_record_that_is_damaged_is_torn_and_an_earlier_one_is_an_error(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b"x\n")
    assert len(opened(path)[1]) == 2
    path.write_bytes(whole.replace(b" 1\n", b" 7\n"))
    with pytest.raises(StoreError, match=r"/j: the record at byte \d+ is damaged, and others come after it"):
        opened(path)


def test_the_journal_of_another_store_is_replaced(path: Path) -> None:
    assert opened(path, "b")[1] == []
    assert opened(path, "a")[1] == []


def test_a_file_that_is_no_journal_is_replaced(tmp_path: Path) -> None:
    for content in (b"", b"x", b"x\ny\n"):
        (tmp_path / "j").write_bytes(content)
        assert opened(tmp_path / "j")[1] == []
        assert opened(tmp_path / "j")[1] == []


def test_replaced_records_are_gone(path: Path) -> None:
    journal, _ = opened(path)
    journal.replace(["8"])
    journal.append("9")
    assert journal.size == path.stat().st_size
    assert opened(path)[1] == [b"8", b"9"]
    assert [file.name for file in path.parent.iterdir()] == ["j"]


def test_a_record_that_cannot_be_written_is_named_and_nothing_comes_after_it(path: Path) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            return len(data) - 1

        def close(self) -> None:
            pass

    journal, _ = opened(path)
    assert journal._file is not None
    journal._file.close()
    journal._file = Full()  # type: ignore[assignment]
    with pytest.raises(StoreError, match=r"/j: the journal of the store cannot be written: 10 of 11 bytes"):
        journal.append("4")
    with pytest.raises(StoreError, match="ends where it could not be written"):
        journal.append("5")


def test_nothing_is_written_to_a_file_that_was_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, _ = opened(path)
    opens = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", **more: opens(self, refuse(mode), **more))
    with pytest.raises(StoreError, match=r"/j: the journal of the store cannot be written: too many files"):
        journal.replace(["8"])
    with pytest.raises(StoreError, match="ends where it could not be written"):
        journal.append("9")


def refuse(mode: str) -> str:
    if mode == "ab":
        raise OSError("too many files")
    return mode
