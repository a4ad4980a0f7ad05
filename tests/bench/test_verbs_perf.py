"""The verbs bench: its parser of perftest's output, and its results from measurements."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from r2ccl.transport.base import Arrived
from r2ccl.transport.tcp.transport import TcpTransport
from r2ccl.types import Nic, PathKey

HEAD = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 TX depth        : 128
---------------------------------------------------------------------------------------
"""
BANDWIDTH = f"""{HEAD}\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 {{}}
---------------------------------------------------------------------------------------
"""
LATENCY = f"""{HEAD}\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]\
   99% percentile[usec]   99.9% percentile[usec]
 65536   200          1121.18        4217.54      1350.85  	       1368.53     	206.96 		\
3176.82 		4217.54
---------------------------------------------------------------------------------------
"""


@pytest.fixture
def perftest(bench: Any) -> Any:
    return bench("perftest")


@pytest.fixture
def perf(bench: Any) -> Any:
    return bench("verbs_perf")


@pytest.fixture
def report(bench: Any) -> Any:
    return bench("verbs_report")


@pytest.fixture
def roles(bench: Any) -> Any:
    return bench("verbs_roles")


@pytest.fixture
def pair(bench: Any) -> Any:
    return bench("verbs_pair")


@pytest.mark.parametrize(
    ("row", "bytes_per_s"),
    [
        # The rate has more digits for small messages, the bandwidth for large ones.
        ("64  200  1.65  0.64  0.010528", 64 * 10_528),
        ("1048576  144  0.00  47.96  0.000048", 47.96 * 2**20),
    ],
)
def test_bandwidth_is_read_from_the_number_with_more_digits(
    perftest: Any, row: str, bytes_per_s: float
) -> None:
    assert perftest.parse_bandwidth(BANDWIDTH.format(row)) == pytest.approx(bytes_per_s)


def test_latency_is_the_typical_one(perftest: Any) -> None:
    assert perftest.parse_latency(LATENCY) == pytest.approx(1350.85e-6)


@pytest.mark.parametrize(
    "said",
    [
        "",
        "Couldn't connect to 127.0.0.1:18515",
        BANDWIDTH.format("64  200  1.65  0.64"),  # a column is missing
        BANDWIDTH.format("64  200  1.65  0.64  nothing"),
        LATENCY,  # output of the other program
    ],
)
def test_what_is_no_report_is_refused_with_its_last_words(perftest: Any, said: str) -> None:
    with pytest.raises(perftest.PerftestError) as caught:
        perftest.parse_bandwidth(said)
    if said:
        assert said.splitlines()[-1].strip() in str(caught.value)


def test_missing_programs_are_named(perftest: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "ib_write_bw" in perftest.missing()
    assert "package perftest" in perftest.missing()


def test_a_server_is_waited_for_until_it_listens(perftest: Any) -> None:
    port = perftest._free_port()
    assert not perftest._is_listening(port)
    with socket.create_server(("", port)):
        assert perftest._is_listening(port)


def test_a_server_that_ends_is_not_waited_for(perftest: Any) -> None:
    with ExitStack() as stack:
        server = perftest._start(
            stack, [sys.executable, "-c", "import sys; sys.exit('no such device')"]
        )
        with pytest.raises(perftest.PerftestError, match="no such device"):
            perftest._wait_listening(perftest._free_port(), server)


def test_no_program_outlives_its_call(perftest: Any) -> None:
    with ExitStack() as stack:
        process: subprocess.Popen[str] = perftest._start(stack, ["sleep", "60"])
        assert process.poll() is None
    assert process.poll() == -9


def measured(pair: Any, **more: Any) -> Any:
    values = {"seconds": 2.0, "cpu_s": 0.5, "posted": 200, "rss_nbytes": 1 << 20}
    return pair.Measured(**(values | more))


def test_a_sample_is_of_one_message(report: Any, pair: Any) -> None:
    both = measured(pair), measured(pair, seconds=9.0, cpu_s=0.25)
    assert report.sample_of("slices", 100, both, 0.01) == (0.02, 0.01, 0.005, 0.0025)


def test_a_latency_is_half_of_the_median_trip(report: Any, pair: Any) -> None:
    both = measured(pair, trips_s=[1.0, 0.2, 0.4]), measured(pair)
    assert report.sample_of("latency", 3, both, 0.1)[:2] == (0.2, 0.1)


def test_ratios_are_of_bandwidths_and_of_latencies(report: Any) -> None:
    # r2ccl takes twice as long as its peer.
    samples = {
        (1 << 20, "slices", "1"): [report.Sample(0.02, 0.01, 1e-3, 2e-3)],
        (64, "latency", "0"): [report.Sample(0.02, 0.01, 1e-3, 2e-3)],
    }
    slices, latency = report.rows_of(samples, 1, 8)
    assert (slices["ratio"], latency["ratio"]) == pytest.approx((0.5, 2.0))
    assert slices["mb_per_s"] == pytest.approx((1 << 20) / 0.02 / 1e6)
    assert slices["peer_mb_per_s"] == pytest.approx(2 * slices["mb_per_s"])
    assert (slices["sender_cpu_us"], slices["receiver_cpu_us"]) == pytest.approx((1e3, 2e3))
    assert (slices["window"], latency["window"]) == (8, None)


def test_the_ratio_is_the_median_of_the_rounds_own(report: Any) -> None:
    each = [report.Sample(1.0, peer_s, 0.0, 0.0) for peer_s in (0.5, 0.9, 0.7)]
    (row,) = report.rows_of({(64, "messages", "0"): each}, 1, 8)
    assert (row["ratio"], row["rounds"]) == (0.7, 3)


def test_tables_have_a_line_a_size_and_columns_flush_right(report: Any) -> None:
    samples = {
        (4096, "slices", "1"): [report.Sample(0.02, 0.01, 1e-3, 2e-3)],
        (64, "messages", "0"): [report.Sample(0.02, 0.0, 1e-3, 2e-3)],
        (64, "latency", "0"): [report.Sample(0.02, 0.0, 1e-3, 2e-3)],
    }
    rows = report.rows_of(samples, 1, 8)
    heading, slices, messages = report.bandwidth_lines(rows)
    assert len(heading) == len(slices) == len(messages)
    assert slices.split()[:4] == ["4", "KiB", "slices", "on"]
    assert "0.50 (0.50 to 0.50)" in slices
    assert messages.split()[:4] == ["64", "B", "messages", "off"]
    assert messages.split()[5:7] == ["-", "-"]  # no peer was measured
    assert len(report.latency_lines(rows)) == 2


def test_growth_is_counted_from_the_first_tenth(report: Any) -> None:
    sizes = [5, 9, 10, 10, 12]
    held = [report.Holding(40 * (i + 1), (mib << 20, 1 << 20)) for i, mib in enumerate(sizes)]
    row = report.memory_row(held, "0")
    assert (row["warm_up_requests"], row["requests"]) == (40, 200)
    assert row["node0_grown_nbytes"] == 7 << 20
    assert row["node1_grown_nbytes"] == 0
    assert "12.0 MiB (+7,168 KiB) and 1.0 MiB (+0 KiB)" in report.memory_line(row)


def test_memory_is_watched_for_as_many_requests_as_asked(perf: Any, pair: Any) -> None:
    class Nodes:
        nmessages = 0

        def run(self, run: Any) -> Any:
            self.nmessages += run.count
            return measured(pair, posted=run.count), measured(pair, posted=0)

    nodes = Nodes()
    held = perf.watch_memory(nodes, 1, 10_000)
    assert held[-1].nrequests == 2 * nodes.nmessages  # each uses up a receive request
    assert held[-2].nrequests < 10_000 <= held[-1].nrequests


def test_without_a_device_it_is_skipped_and_the_reason_is_said(
    perf: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perf, "list_hcas", lambda: ())
    monkeypatch.setattr(sys, "argv", ["verbs_perf.py"])
    assert perf.main() == 69
    assert "no ACTIVE RDMA port" in capsys.readouterr().err


def hca(name: str) -> Any:
    from r2ccl.topology.hcas import Gid, Hca

    gid = Gid(3, "RoCE v2", "::ffff:10.0.0.1", "eth0")
    return Hca(name, 1, "eth0", "Ethernet", "ACTIVE", 100_000, 0, (gid,))


def test_ports_are_those_named_or_those_of_a_lab(
    perf: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["rxe_n0r0", "rxe_n0r1", "rxe_n1r0", "rxe_n1r1"]
    monkeypatch.setattr(perf, "list_hcas", lambda: [hca(name) for name in names])
    for variable, value in {"": "1", "_NODES": "2", "_NICS": "2"}.items():
        monkeypatch.setenv(f"R2CC_RDMALAB{variable}", value)
    ((near, far),) = perf.choose_pairs("", "", 1)
    assert (near, far) == (("rxe_n0r0", 1, 3), ("rxe_n1r0", 1, 3))
    monkeypatch.delenv("R2CC_RDMALAB")
    ((near, far),) = perf.choose_pairs("rxe_n0r1", "", 1)  # one port, which sees itself
    assert near == far == ("rxe_n0r1", 1, 3)
    for near, far, nrails, why in (
        ("", "", 1, "name the devices"),
        ("mlx5_0", "", 1, "mlx5_0"),
        ("rxe_n0r0", "rxe_n1r0", 2, "2 rails"),
    ):
        with pytest.raises(perf.Unavailable, match=why):
            perf.choose_pairs(near, far, nrails)


def test_a_node_that_ends_is_noticed(
    pair: Any, perftest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mute = tmp_path / "node.py"
    mute.write_text("")
    monkeypatch.setattr(pair, "_NODE", str(mute))
    port = perftest.Port("mlx5_0", 1, 3)
    with pytest.raises(pair.NodeError, match="node 0 ended"):
        pair.Nodes([(port, port)], "0")


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("slices", 3000), ("messages", 3000), ("latency", 64), ("latency", 70_000)]
)
def test_roles_move_what_they_are_told_over_any_transport(
    roles: Any, pair: Any, kind: str, nbytes: int
) -> None:
    """Over sockets here: the roles see the transport's interface alone."""
    run = pair.Run(kind, nbytes, 37, 4, 10.0)
    transports = [
        TcpTransport(
            rank, 1, eager_nbytes=64 << 10, sources={0: Nic("lo", "127.0.0.1")}, targets={},
            probe_timeout_s=1.0,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    sockets = tcp_pair()
    ends = []
    for node, (transport, sock) in enumerate(zip(transports, sockets, strict=True)):
        path = PathKey(1 - node, 0)
        transport.open(path, sock)
        ends.append(roles.role_of(node, roles.Side(transport, path, run)))
    narrived = [0, 0]
    for node in (1, 0):
        ends[node].start()
        transports[node].flush()
    give_up = time.monotonic() + 10.0
    while not all(end.is_done for end in ends):
        assert time.monotonic() < give_up
        for node, (transport, end) in enumerate(zip(transports, ends, strict=True)):
            for event in transport.poll(0.001):
                narrived[node] += isinstance(event, Arrived)
                end.on(event)
            transport.flush()
    for transport in transports:
        transport.close()
    is_latency = kind == "latency"
    assert narrived == [37 if is_latency else 1, 37]  # 1: the reply that ends the run
    assert len(ends[0].trips_s) == (37 if is_latency else 0)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        low = socket.create_connection(listener.getsockname())
        high, _ = listener.accept()
    return low, high
