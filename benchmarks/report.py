"""What a benchmark's results say of the packages that it ran with, and the file they are written to."""

import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def versions(*packages: str) -> dict[str, str]:
    """The installed version of each."""
    return {package: importlib.metadata.version(package) for package in packages}


def write(path: Path | None, result: Mapping[str, Any]) -> None:
    """Writes the results as JSON, where a file is named."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
