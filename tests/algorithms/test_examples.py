"""The examples in the docstrings of the algorithms can be checked by hand, and hold."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import megarl.algorithms


def test_examples_of_the_docstrings():
    tried = 0
    for module in pkgutil.walk_packages(megarl.algorithms.__path__, "megarl.algorithms."):
        failed, attempted = doctest.testmod(importlib.import_module(module.name))
        assert not failed, module.name
        tried += attempted
    assert tried > 40
