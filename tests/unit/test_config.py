"""Settings that have more than one spelling, and values that are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from r2ccl import planning
from r2ccl.config import AGREED, MODES, Config, parse_failures
from r2ccl.errors import InvalidArgument


@pytest.mark.parametrize(("number", "name"), list(enumerate(MODES[:4])))
def test_a_mode_is_known_by_its_number_too(number: int, name: str) -> None:
    by_number = Config.from_env({"R2CC_MODE": str(number)})
    assert by_number.mode == name
    assert by_number.digest() == Config(mode=name).digest()


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("mode", "AUTO", "auto"), ("mode", "Balance", "balance"), ("algo", "Ring", "ring"),
        ("fabric", "NONE", "none"), ("shm", "Auto", "auto"), ("dump_signal", "sigusr1", "SIGUSR1"),
        ("debug", "info", "info"),
    ],
)  # fmt: skip
def test_a_named_value_may_be_in_any_case(name: str, given: str, value: str) -> None:
    config = Config.from_env({f"R2CC_{name.upper()}": given})
    assert getattr(config, name) == value
    assert config.digest() == Config.from_env({}, **{name: value}).digest()


@pytest.mark.parametrize("name", ["mode", "algo", "fabric", "shm", "rails", "timeout_s"])
def test_an_empty_variable_is_no_value(name: str) -> None:
    """Only settings for which the empty text has a meaning may be empty."""
    with pytest.raises(InvalidArgument, match="allowed is"):
        Config.from_env({f"R2CC_{name.upper()}": ""})


@pytest.mark.parametrize("number", [2, np.int64(2), "balance"])
def test_a_keyword_may_be_the_number_of_a_mode(number: Any) -> None:
    assert Config.from_env({}, mode=number) == Config(mode="balance")


@pytest.mark.parametrize("given", [0, "0", np.int8(0)])
def test_a_switch_may_be_a_number(given: Any) -> None:
    assert Config.from_env({}, shm=given) == Config(shm="0")


@pytest.mark.parametrize(
    ("name", "given"), [("rails", None), ("timeout_s", "1"), ("debug", 3), ("secret", b"x")]
)
def test_a_config_refuses_values_of_other_types(name: str, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"\(R2CC_{name.upper()}.*\): allowed is"):
        Config(**{name: given})


@pytest.mark.parametrize(
    ("name", "given"),
    [("failed_nics", "a:\udcff"), ("control_address", "\0"), ("secret_file", "a\0b")],
)
def test_text_that_cannot_be_passed_on_is_refused(name: str, given: str) -> None:
    """Null characters end the text of a system call; other ranks cannot decode other encodings."""
    with pytest.raises(InvalidArgument, match="allowed is text without null characters"):
        Config(**{name: given})


def test_the_name_of_a_file_may_have_any_bytes() -> None:
    assert Config(dump_file="/tmp/\udcff").dump_file == "/tmp/\udcff"


@pytest.mark.parametrize(("name", "given"), [("mode", 4), ("mode", True), ("shm", 2), ("ipc", 1.0)])
def test_a_number_that_is_no_value_is_refused(name: str, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"\(R2CC_{name.upper()}\): allowed is"):
        Config.from_env({}, **{name: given})


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("R2CC_TIMEOUT_S", "3s", "a number of seconds, such as 3"),
        ("R2CC_TIMEOUT_S", "500ms", "a number of seconds, such as 0.5"),
        ("R2CC_TIMEOUT_S", "2 min", "a number of seconds, such as 120"),
        ("R2CC_TIMEOUT_S", "", "a number of seconds, such as 1800"),
        ("R2CC_SLICE_NBYTES", "1M", "a whole number of bytes, such as 1048576"),
        ("R2CC_SLICE_NBYTES", "64KiB", "a whole number of bytes, such as 65536"),
        ("R2CC_SLICE_NBYTES", "much", "a whole number of bytes, such as 1048576"),
        ("R2CC_IB_TIMEOUT", "20s", "a whole number, such as 16"),
        ("NCCL_IB_RETRY_CNT", "2.5", "a whole number, such as 3"),
    ],
)
def test_text_that_is_no_number_is_told_what_it_means(
    variable: str, text: str, allowed: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Config.from_env({variable: text})
    page = "see the page Settings of the documentation"
    assert str(caught.value) == f"{variable}={text!r}: allowed is {allowed}; {page}"


def test_a_keyword_that_is_text_is_told_the_number() -> None:
    text: Any = "3s"
    with pytest.raises(InvalidArgument, match=r"a number of seconds, such as 3, of type float$"):
        Config.from_env({}, timeout_s=text)


@pytest.mark.parametrize(
    ("name", "near"),
    [("timeout", "timeout_s"), ("slice_bytes", "slice_nbytes"), ("nrails", "rails")],
)
def test_an_unknown_keyword_names_the_nearest_setting(name: str, near: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^unknown setting {name}; did you mean {near}\?"):
        Config.from_env({}, **{name: 1})
    with pytest.raises(InvalidArgument, match=r"^unknown setting xyzzy; known: mode, "):
        Config.from_env({}, xyzzy=1)


@pytest.mark.parametrize(
    ("given", "name", "variable"),
    [
        ({"rank": 0}, "rank", "RANK"),
        ({"world_size": 4, "rank": 0}, "rank", "RANK"),
        ({"nranks": 4}, "nranks", "WORLD_SIZE"),
    ],
)
def test_a_rank_as_a_keyword_is_told_how_to_set_it(
    given: dict[str, int], name: str, variable: str
) -> None:
    words = rf"^unknown setting {name}: .* variable {variable}, not from an argument;.*r2ccl launch"
    with pytest.raises(InvalidArgument, match=words):
        Config.from_env({}, **given)


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"R2CC_MODE.*failstop, migrate"):
        Config.from_env({"R2CC_MODE": "4"})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("rails", "2"), ("rails", 2.0), ("rails", True), ("timeout_s", None), ("timeout_s", "3"),
        ("timeout_s", 10**400), ("mode", ["auto"]), ("debug", 1), ("spin_s", -1),
        ("spin_s", float("nan")), ("slice_nbytes", 2 << 30), ("eager_slots", 1 << 63),
    ],
)  # fmt: skip
def test_a_keyword_of_another_type_or_range_is_refused(name: str, given: Any) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{name}=.*\(R2CC_{name.upper()}.*\): allowed is"):
        Config.from_env({}, **{name: given})


@pytest.mark.parametrize("given", [5, b"secret"])
def test_a_secret_that_is_no_text_is_refused_but_not_shown(given: Any) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^secret='\*\*\*'.*: allowed is a value of type str"
    ):
        Config.from_env({}, secret=given)


def test_a_keyword_precedes_its_variable_and_may_be_numpys() -> None:
    given: Any = {"timeout_s": 3, "rails": np.int64(2), "spin_s": np.float64(0.5)}
    config = Config.from_env({"R2CC_RAILS": "1", "R2CC_TIMEOUT_S": "7"}, **given)
    assert (config.timeout_s, config.rails, config.spin_s) == (3.0, 2, 0.5)
    assert [type(each) for each in (config.timeout_s, config.rails)] == [float, int]


def test_plans_depend_only_on_agreed_settings() -> None:
    """Ranks that differ in another setting would run different schedules, and wait forever."""
    sources = "".join(path.read_text() for path in Path(planning.__path__[0]).glob("*.py"))
    used = set(re.findall(r"config\.(\w+)", sources)) & set(Config.__struct_fields__)
    assert {"algo", "balance", "eager_nbytes"} <= used
    assert used - set(AGREED) == set()


def test_nics_declared_failed_are_pairs_of_host_and_nic() -> None:
    text = "a:eth0, b:mlx5_0:1,0:2,"
    assert parse_failures(text) == (("a", "eth0"), ("b", "mlx5_0:1"), ("0", "2"))
    assert parse_failures("") == ()
    config = Config(failed_nics=text)
    assert config.digest() == Config().digest(), "ranks may declare different NICs"
    for wrong in ("eth0", "a:", ":eth0"):
        with pytest.raises(InvalidArgument, match=r"R2CC_FAILED_NICS\): allowed is host:nic"):
            Config(failed_nics=wrong)


def test_failures_may_be_declared_as_the_published_system_does() -> None:
    declared = {"R2CC_FAILED_HCA": "mlx5_2, mlx5_3", "R2CC_FAILED_NODE": "1"}
    assert Config.from_env(declared).failed_nics == "1:mlx5_2,1:mlx5_3"
    assert Config.from_env({"R2CC_FAILED_HCA": "mlx5_2"}).failed_nics == "0:mlx5_2"
    assert Config.from_env({"R2CC_FAILED_NODE": "1"}).failed_nics == ""
    both = {**declared, "R2CC_FAILED_NICS": "a:eth0"}
    assert Config.from_env(both).failed_nics == "a:eth0"
    assert Config.from_env(both, failed_nics="").failed_nics == ""
    with pytest.raises(InvalidArgument, match="R2CC_FAILED_HCA='2': give the names"):
        Config.from_env({"R2CC_FAILED_HCA": "2"})
