"""Kinds of files that are no rows of text, told by their first bytes: a wrong name is named as such."""

from __future__ import annotations

from pathlib import Path

#: First bytes, what the file is, and what to do with it. A specification of each kind fixes its first bytes.
_KINDS = (
    (b"PAR1", "a parquet file", "name it {stem}.parquet"),
    (b"ARROW1", "an Arrow file", "write it as parquet"),
    (b"\xff\xff\xff\xff", "an Arrow stream", "name the folder of save_to_disk that it is in, or write it as parquet"),
    (b"\x1f\x8b", "compressed with gzip", "unpack it: gzip -dc {path} > {unpacked}"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd", "unpack it: zstd -dc {path} > {unpacked}"),
    (b"BZh", "compressed with bzip2", "unpack it: bzip2 -dc {path} > {unpacked}"),
    (b"\xfd7zXZ\x00", "compressed with xz", "unpack it: xz -dc {path} > {unpacked}"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it"),
    (b"PK\x03\x04", "a zip archive (a spreadsheet's .xlsx is one, too)", "unpack it, or save the sheet as csv"),
    (b"\x89HDF", "an HDF5 file", "write its rows as jsonl or parquet"),
    (b"SQLite format 3\x00", "an SQLite database", "write its rows as jsonl or parquet"),
    (b"\x80\x04\x95", "a pickle", "write its rows as jsonl or parquet"),
    (b"\x93NUMPY", "a NumPy array", "write its rows as jsonl or parquet"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself", "fetch it: git lfs pull"),
)
_PACKED = (".gz", ".zst", ".bz2", ".xz")


def foreign_kind(path: Path) -> tuple[str, str] | None:
    """What a file is by its first bytes and what to do about it; None: its name says it, or it is no known kind."""
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError:  # whoever reads the whole file says why
        return None
    for first, kind, fix in _KINDS:
        if head.startswith(first) and not (first == b"PAR1" and path.suffix.lower() == ".parquet"):
            stem = path.with_suffix("")
            unpacked = stem if path.suffix.lower() in _PACKED else path.with_name(f"{path.stem}.unpacked{path.suffix}")
            return kind, fix.format(path=path, stem=stem, unpacked=unpacked)
    return None


def unknown_form_fix(path: Path) -> str:
    """What to do with a data file whose suffix is not known."""
    kind = foreign_kind(path)
    if kind is not None:
        return f"it is {kind[0]}: {kind[1]}"
    if path.suffix == ".py":
        return f"for a function of it, write {path.stem}:function, with {path.stem} importable from the working folder"
    return "convert it, or rename it"
