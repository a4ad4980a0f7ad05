"""The image of deploy/Containerfile, as a folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy/Containerfile"


def instructions(name: str) -> list[str]:
    """Return the arguments of an instruction of the Containerfile."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def copy_into(root: Path) -> None:
    """Copy the files that the image contains; `root` stands for its root directory."""
    for line in instructions("COPY"):
        *sources, target = line.split()
        place = root / target.lstrip("/")
        if target.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)


def image_name() -> str:
    """Return the name that the command in the Containerfile gives the image."""
    [name] = re.findall(r"podman build -t (\S+) ", CONTAINERFILE.read_text(encoding="utf-8"))
    return str(name)
