"""Tools of the tests."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any, Literal


def shift(text: str, by: int = 1, way: Literal["up", "down"] = "up") -> str:
    """Move every letter of a text
    in the alphabet.

    Args:
        text: what is moved.
        by: how far, and
            no further.
        way: direction.

    Returns:
        The moved text.
    """
    print("noise")
    return "".join(chr(ord(c) + (by if way == "up" else -by)) for c in text)


def sums(numbers: list[float]) -> dict[str, float]:
    """Sum of numbers."""
    return {"sum": sum(numbers)}


def misbehave(how: str) -> str:
    """Fail in some way."""
    if how == "sleep":
        time.sleep(60)
    if how.startswith("write "):
        _, kind, marker = how.split()
        runpy.run_path(str(Path(__file__).parents[1] / "hostile.py"))["attack"](marker, kind)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "die":
        os._exit(3)
    if how == "eat":
        return "x" * (4 << 30)
    raise KeyError(how)


def meet(folder: str, count: int) -> str:
    """Wait until so many processes have come."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < count:
        time.sleep(0.01)
    return "met"


def untyped(a) -> int:  # type: ignore[no-untyped-def]
    """An argument without a type."""
    return int(a)


def silent(a: int) -> int:
    return a


def half(number: int, images: list[Any]) -> list[Any]:
    """Show the left half of an image.

    Args:
        number: of the image, from 0.
    """
    image = images[number]
    return [image.crop((0, 0, image.width // 2, image.height)), "the left half"]
