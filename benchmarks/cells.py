"""Results of single runs, kept in files, so that a benchmark that was cut off goes on where it was."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FOLDER = Path(__file__).resolve().parent.parent / "build" / "training"


def cell(name: str, compute: Callable[[], dict[str, Any]], folder: Path | None = None) -> dict[str, Any]:
    """The result of this name: from its file, or computed and written there."""
    folder = folder or FOLDER
    path = folder / f"{re.sub(r'[^a-zA-Z0-9.+-]+', '-', name)}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
    result = compute()
    folder.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(result), encoding="utf-8")
    temporary.replace(path)
    return result


def arguments(description: str) -> argparse.ArgumentParser:
    """What every comparison of networks takes on the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--jobs", type=int, default=1, help="networks at the same time")
    parser.add_argument("--again", default="", help="forget the results whose names hold this word")
    parser.add_argument("--only", default="", help="networks whose names hold this text")
    return parser


def begun(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was asked for, after forgetting what is to be measured again."""
    options = parser.parse_args()
    if options.again:
        print(f"{forget(options.again)} results are forgotten")
    return options


def side_by_side(measure: Callable[[str], T], names: Sequence[str], jobs: int) -> list[T]:
    """One result per network, so many at the same time, each in a process of its own."""
    if jobs == 1:
        return [measure(name) for name in names]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(measure, names))


def forget(word: str) -> int:
    """Delete the results whose names hold a word; how many there were."""
    slug = re.sub(r"[^a-zA-Z0-9.+-]+", "-", word)
    found = [path for path in FOLDER.glob("*.json") if slug in path.name]
    for path in found:
        path.unlink()
    return len(found)
