"""Serving: what a prefill and a decode step take, and how many bytes they reduce."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from r2ccl.errors import InvalidArgument
from r2ccl.flowsim.serving import Server, Transformer, decode, latency, prefill

MODEL = Transformer(nparameters=1e9, nlayers=10, hidden=100, kv_heads=4, head_size=25)
SERVER = Server(nprocessors=8, flops_per_s=1e12, memory_bytes_per_s=1e10)


class Asked:
    """An allreduce of 1 ms that notes what it is asked."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> float:
        self.sizes.append(nbytes)
        return 1e-3


def free(nbytes: int) -> float:
    return 0.0


def test_a_prefill_reduces_all_tokens_twice_a_layer() -> None:
    asked = Asked()
    found = prefill(MODEL, SERVER, 2, 50, asked)
    assert set(asked.sizes) == {2 * 50 * 100 * 2}
    assert found.communication_s == pytest.approx(20e-3)
    assert found.time_s == found.compute_s + found.communication_s


def test_a_decode_step_reduces_one_token_of_each_sequence() -> None:
    asked = Asked()
    assert decode(MODEL, SERVER, 3, 50, asked).communication_s == pytest.approx(20e-3)
    assert set(asked.sizes) == {3 * 100 * 2}


def test_a_prefill_computes_parameters_and_pairs_of_tokens() -> None:
    dense, pairs = 2 * 1e9 * 50, 50 * 50 / 2
    expected = (dense + 4 * 10 * 100 * pairs) / 8e12
    assert prefill(MODEL, SERVER, 1, 50, free).compute_s == pytest.approx(expected)
    # Prompts do not look at one another.
    assert prefill(MODEL, SERVER, 2, 50, free).compute_s == pytest.approx(2 * expected)


def test_a_decode_step_reads_the_weights_and_every_tokens_state() -> None:
    weights = 1e9 * 2 / 8
    kept = 3 * 50 * 2 * 10 * 25 * 2  # one head each of four processors, copied to four more
    found = decode(MODEL, SERVER, 3, 50, free).compute_s
    assert found == pytest.approx((weights + kept) / 1e10)


def test_many_sequences_are_limited_by_operations() -> None:
    quick = msgspec.structs.replace(SERVER, memory_bytes_per_s=1e20)
    assert decode(MODEL, quick, 64, 1, free).compute_s == pytest.approx(2 * 1e9 * 64 / 8e12)


def test_a_request_is_its_prefill_and_a_step_a_further_token() -> None:
    found = latency(MODEL, SERVER, length=50, nsequences=3, allreduce_s=Asked())
    assert found.ttft_s == prefill(MODEL, SERVER, 1, 50, Asked()).time_s
    assert found.tpot_s == decode(MODEL, SERVER, 3, 50, Asked()).time_s


def test_slower_allreduces_make_everything_slower() -> None:
    fast, slow = (
        latency(MODEL, SERVER, length=50, nsequences=3, allreduce_s=lambda nbytes, s=s: s * nbytes)
        for s in (1e-9, 2e-9)
    )
    assert fast.ttft_s < slow.ttft_s
    assert fast.tpot_s < slow.tpot_s


@pytest.mark.parametrize(
    ("made", "name"),
    [(MODEL, name) for name in msgspec.structs.asdict(MODEL)]
    + [(SERVER, name) for name in msgspec.structs.asdict(SERVER)],
)
def test_what_cannot_be_is_refused(made: Any, name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"serving: {name}=0; allowed is above 0"):
        type(made)(**msgspec.structs.asdict(made) | {name: 0})
