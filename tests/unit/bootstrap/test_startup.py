"""Variables that a user misspells are named, with the setting that was meant."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from r2ccl.bootstrap.messages import Codec
from r2ccl.bootstrap.startup import connect, unknown
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.types import Nic

ROOT = Path(__file__).parents[3]


class Note(msgspec.Struct, tag="note"):
    """A message type, which a control plane must have."""


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("R2CC_TIMEOUT", "R2CC_TIMEOUT_S"),
        ("R2CC_TIMEOUTS_S", "R2CC_TIMEOUT_S"),
        ("R2CCL_MODE", "R2CC_MODE"),
        ("R2CC_SOCKET_IFNAMES", "R2CC_SOCKET_IFNAME"),
        ("R2CC_FAILED_NIC", "R2CC_FAILED_NICS"),
        ("R2CC_FAILED_HCAS", "R2CC_FAILED_HCA"),
        ("R2CC_DEBUG_FILE", "R2CC_DEBUG"),
        ("R2CC_SECRET_FILES", "R2CC_SECRET_FILE"),
        ("R2CC_ALGO_NAME", "R2CC_ALGO"),
    ],
)
def test_the_nearest_setting_is_named(name: str, near: str) -> None:
    assert list(unknown({name: "1"})) == [(name, f"did you mean {near}?")]


def test_a_name_like_no_setting_gets_no_guess() -> None:
    assert list(unknown({"R2CC_XYZZY": "1"})) == [("R2CC_XYZZY", "unset it or correct its name")]


def sources(folder: Path) -> Iterator[str]:
    """Yield the text of each module; one that is removed meanwhile, as by an editor, is none."""
    for path in folder.rglob("*.py"):
        with contextlib.suppress(FileNotFoundError):
            yield path.read_text(encoding="utf-8")


def test_variables_that_are_read_are_known() -> None:
    """All on the page of settings, all that the library names, and all that tests read."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/tuning.md", "Makefile")]
    texts += sources(ROOT / "r2ccl")
    wanted = {name for text in texts for name in re.findall(r"\bR2CC_[A-Z_]+[A-Z]\b", text)}
    for text in sources(ROOT / "tests"):
        wanted.update(re.findall(r'environ.{1,6}"(R2CC_[A-Z_]+)"', text))
    assert len(wanted) > 40
    assert list(unknown(dict.fromkeys(wanted, "1"))) == []
    assert list(unknown({"NCCL_DEBUG": "", "R2D2": "", "XR2CC_MODE": ""})) == []


def test_rank_0_warns_of_each_once(caplog: pytest.LogCaptureFixture) -> None:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "R2CC_TIMEOUTS_S": "3",
        "R2CC_TIMEOUT_S": "3",
    }
    rails = (Nic("lo", "127.0.0.1"),)
    with caplog.at_level(logging.WARNING, "r2ccl"):
        connect(Config.from_env(env), codec=Codec(Note), nics_for=lambda *_: rails, env=env).close(
            0
        )
    (record,) = caplog.records
    assert record.getMessage() == (
        "R2CC_TIMEOUTS_S is not a setting of r2ccl and has no effect: did you mean R2CC_TIMEOUT_S?"
    )


def test_listeners_are_closed_if_one_cannot_be_opened() -> None:
    env = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    rails = (Nic("lo", "127.0.0.1"), Nic("eth9", "192.0.2.1"))
    before = os.listdir("/proc/self/fd")
    with pytest.raises(InvalidArgument, match=re.escape("192.0.2.1")) as caught:
        connect(Config.from_env(env), codec=Codec(Note), nics_for=lambda *_: rails, env=env)
    assert os.listdir("/proc/self/fd") == before, caught
