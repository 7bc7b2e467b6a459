"""What receivers call their weights: the trainer's version and the run, `NUMBER@RUN`."""

from __future__ import annotations


def version_tag(number: int, run: str) -> str:
    """What receivers call version `number` of a run. Two runs may push to one in turn, and both count from 0."""
    return f"{number}@{run}"


def read_tag(tag: object) -> tuple[int, str]:
    """Version and run of a tag.

    Raises:
        ValueError: no run has named these weights.

    >>> read_tag("4@1f")
    (4, '1f')
    """
    number, _, run = tag.partition("@") if isinstance(tag, str) else ("", "", "")
    if not (number.isdecimal() and run):
        raise ValueError(f"the server calls its weights {tag!r}, which is no version that a run has sent")
    return int(number), run
