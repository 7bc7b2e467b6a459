"""Equality of mathematical answers: LaTeX or plain text, read as a whole or compared as text.

    text -> clean -> tokens -> grammar (expressions) -> tree -> comparison (equality of values, regions)

An answer counts as mathematics only if every token of it is in the tree; else its normalised text is compared. Time is
proportional to the length of the answers, up to bounds beyond which text is compared.
"""

from megarl.rewards.mathematics.answers import boxed, equal, unboxed

__all__ = ["boxed", "equal", "unboxed"]
