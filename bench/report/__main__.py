"""Compares training runs on one page, or brings the README up to date; see python -m bench.report --help."""

import argparse
import sys
from pathlib import Path

from errors import UserError, refusing

HELP = """\
Compare training runs:
  python -m bench.report runs=outputs/a,outputs/b
  python -m bench.report runs=outputs results=bench/results/h200 out=comparison.html

  runs=      folders of python train.py, separated by commas; a parent folder or a glob stands for all runs below it
  results=   also the benchmark tables of this folder of bench/results (without it the page shows none)
  out=       the page to write, one HTML file that needs no network (report.html)

Bring the README up to date:
  python -m bench.report --readme            its tables and pictures made anew from bench/results
  python -m bench.report --readme --check    change nothing; fail where a table, a picture or a page differs
"""
DEFAULTS = {"runs": None, "results": None, "out": "report.html"}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The two flags, and `settings`: runs, results and out.

    Raises:
        UserError: an unknown or empty setting, or arguments that do not go together.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    usage = "python -m bench.report [runs=...] [results=...] [out=...] | --readme [--check]"
    parser = argparse.ArgumentParser("bench.report", usage, HELP, formatter_class=formatter)
    parser.add_argument("settings", nargs="*", metavar="key=value", help=argparse.SUPPRESS)
    parser.add_argument("--readme", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.readme and given.settings:
        raise UserError(f"--readme takes no {given.settings[0]}; it is made from bench/results alone")
    if given.check and not given.readme:
        raise UserError("--check is of --readme; give both")
    given.settings = DEFAULTS | dict(map(setting, given.settings))
    if not (given.readme or given.settings["runs"] or given.settings["results"]):
        raise UserError("there is nothing to report on; give runs=FOLDER, results=FOLDER or --readme (see --help)")
    return given


def setting(argument: str) -> tuple[str, str]:
    key, _, value = argument.partition("=")
    if key not in DEFAULTS:
        raise UserError(f"{key} is no setting of the report; it has {', '.join(DEFAULTS)}")
    if not value:
        raise UserError(f"{key} has no value; give it as {key}=...")
    return key, value


def run(given: argparse.Namespace) -> None:
    if given.readme:
        from bench.report import readme  # imports torch and matplotlib

        return readme.rewrite(given.check)
    from bench.report.page import write_page
    from bench.report.runs import read_runs
    from bench.report.tables import read_results

    places, out = given.settings, Path(given.settings["out"])
    runs = read_runs(places["runs"].split(",")) if places["runs"] else []
    write_page(runs, read_results(places["results"]) if places["results"] else [], out)
    print(f"report in {out}")


def main() -> None:
    with refusing():
        run(parse(sys.argv[1:]))


if __name__ == "__main__":
    main()
