"""``python -m benchmarks [names]``: measure tables of the documentation and write them into their pages."""

from __future__ import annotations

import argparse

from benchmarks.runner import registry, run


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help="benchmarks or pages; all of them if none is named")
    parser.add_argument("--only", default="", help="measure and print only cases with this text in their label")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--list", action="store_true", help="what there is")
    options = parser.parse_args()
    if options.list:
        for each in registry().values():
            print(f"{each.name:24}docs/{each.page}.md: {' | '.join(each.columns)}")
        return
    run(options.names, options.only, options.jobs)


if __name__ == "__main__":
    main()
