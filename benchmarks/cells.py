"""Results of single runs, kept in files, so that a benchmark that was cut off goes on where it was."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def forget(word: str) -> int:
    """Delete the results whose names hold a word; how many there were."""
    slug = re.sub(r"[^a-zA-Z0-9.+-]+", "-", word)
    found = [path for path in FOLDER.glob("*.json") if slug in path.name]
    for path in found:
        path.unlink()
    return len(found)
