"""`megarl doctor gpu`: what works on this machine, and how fast. Parts that need GPUs are skipped where there are none.

    megarl doctor gpu                                # all sections; those that have passed before are kept
    megarl doctor gpu --only kernels,training        # some of them
    megarl doctor gpu --skip steps --again           # all others, also those that have passed
    megarl doctor gpu --out /shared/certificate      # where results are kept (default: runs/certificate)

Exit code 1: a section has failed. docs/gpu.md describes each section and the figures to expect.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megarl.system.errors import choose

FOLDER = Path("runs/certificate")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `megarl doctor gpu`."""
    for option, effect in (("--only", "run these sections, in their order"), ("--skip", "leave these sections out")):
        parser.add_argument(option, metavar="A,B", action="append", default=[], help=f"{effect}; may be repeated")
    parser.add_argument("--again", action="store_true", help="also repeat sections that have passed")
    parser.add_argument("--list", action="store_true", help="print the sections, and stop")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, default=FOLDER, help=f"folder for the results (default: {FOLDER})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the chosen sections of the certificate, print and save their results; return the exit code."""
    from rich.console import Console

    from megarl.certificate.harness import SECTIONS, certify, machine_key, read_result
    from megarl.certificate.report import as_table, bug_report, write_reports
    from megarl.system.processes import write_atomically

    if arguments.list:
        print("\n".join(f"{section.name:<14} {section.title}" for section in SECTIONS))
        return 0
    sections = {section.name: section for section in SECTIONS}
    names = chosen(list(sections), arguments.only, arguments.skip)
    folder = arguments.out.resolve()
    console = Console(highlight=False)

    def tell(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    results = certify([sections[name] for name in names], folder, again=arguments.again, tell=tell)
    failed = [result for result in results if result.status == "failed"]
    for result in failed:
        text = bug_report(result, folder)
        write_atomically(folder / result.section / "bug.txt", text)
        tell(f"\n== {result.section} failed ==\n{text}")
    machine = results[0].machine if results else machine_key()
    saved = (read_result(folder / name) for name in sections)
    everything = [result for result in saved if result is not None and result.machine == machine]
    write_reports(everything, folder)
    console.print(as_table(everything))
    console.print(f"saved: {folder / 'certificate.html'}, certificate.json")
    return 1 if failed else 0


def chosen(names: Sequence[str], only: Sequence[str], skip: Sequence[str]) -> list[str]:
    """Return the sections of the certificate that `--only` and `--skip` select, in order. Raise ConfigError if a name
    is not a section."""
    wanted = [name for text in only for name in text.split(",")]
    unwanted = [name for text in skip for name in text.split(",")]
    for option, given in (("--only", wanted), ("--skip", unwanted)):
        for name in given:
            choose(dict.fromkeys(names), name, "unknown section", where=option)
    return [name for name in names if (not wanted or name in wanted) and name not in unwanted]
