"""Generation and training that are sleeps: what running ahead brings, beside a pipeline without overheads."""
