"""The process of one section: `python -m megarl.certificate.process MODULE:FUNCTION FOLDER DEADLINE_S`."""

from __future__ import annotations

import faulthandler
import sys
import traceback
from pathlib import Path

from megarl.certificate.findings import Findings, Skipped
from megarl.system.imports import import_callable
from megarl.system.processes import signals_raise

_BEFORE_S = 5.0  # seconds before the deadline at which stacks are written, so that the log shows where a section hangs


def main(work: str, folder: Path, deadline_s: float) -> int:
    """Run the section; return its exit code, which is 0 even if checks failed, because the findings record these."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(deadline_s - _BEFORE_S, deadline_s / 2))
    found = Findings(folder / "findings.jsonl")
    try:
        with signals_raise():
            import_callable(work, where="section")(found, folder)
    except Skipped as why:
        found.skip("section", why)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])))
