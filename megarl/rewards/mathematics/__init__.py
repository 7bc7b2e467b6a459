"""Equality of mathematical answers, given in LaTeX or plain text.

    text -> clean -> tokens -> grammar (expressions) -> tree -> comparison (equality of values, regions)

An answer counts as mathematics only if every token is part of the tree; otherwise its normalised text is compared. The
time grows linearly with the length of the answers, up to bounds beyond which text is compared.
"""

from megarl.rewards.mathematics.answers import boxed, equal, unboxed

__all__ = ["boxed", "equal", "unboxed"]
