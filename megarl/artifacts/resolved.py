"""The resolved configuration in a run folder, and that of a start that the run has not accepted yet.

    launcher -> config.next.yaml -> every rank reads it -> accepted: config.yaml (rank 0, with the run's record)
                                                        -> refused: removed, config.yaml still fits the checkpoints

A new run folder has config.yaml from the beginning.
"""

from __future__ import annotations

from pathlib import Path

from megarl.processes import write_atomically

NAME, NEXT = "config.yaml", "config.next.yaml"


def propose(run_dir: Path, text: str) -> None:
    """Write the configuration of a start; the previous one stays until `take_up`."""
    withdraw(run_dir)
    path = run_dir / NAME
    write_atomically(run_dir / NEXT if path.is_file() and path.read_bytes() != text.encode() else path, text)


def proposed(run_dir: Path) -> Path:
    """Return the configuration that the ranks of this start read."""
    return path if (path := run_dir / NEXT).is_file() else run_dir / NAME


def take_up(run_dir: Path) -> None:
    """Accept the start: its configuration becomes the run's. One process calls this."""
    if (run_dir / NEXT).is_file():
        (run_dir / NEXT).replace(run_dir / NAME)


def make_again(run_dir: Path, text: str) -> None:
    """Write the configuration of a run that has ended, if it was deleted meanwhile."""
    if not (run_dir / NAME).is_file():
        write_atomically(run_dir / NAME, text)


def withdraw(run_dir: Path) -> None:
    """Remove a configuration that was never accepted."""
    (run_dir / NEXT).unlink(missing_ok=True)
