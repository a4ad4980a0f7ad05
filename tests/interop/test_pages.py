"""The how-to pages for Ray, Dask and JAX are followed with these libraries."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.pages import ROOT, follow


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["ray", "dask", "jax"])
def test_what_a_page_says_happens(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed" if name == "dask" else name)
    monkeypatch.setenv("HOME", str(tmp_path))  # where Ray writes a token
    assert set(follow(ROOT / f"docs/howto/{name}.md", tmp_path)) <= {"cluster"}
