"""Vision-language-action policies, which choose action tokens from pictures and an instruction."""
