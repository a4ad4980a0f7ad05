"""The how-to page for torch is followed with torch."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages import ROOT, follow


@pytest.mark.timeout(600)
def test_what_the_page_says_happens(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    assert follow(ROOT / "docs/howto/torch.md", tmp_path) == []
