"""Vision-language-action policies: pictures and an instruction in, tokens of actions out."""
