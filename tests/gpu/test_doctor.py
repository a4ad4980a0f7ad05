"""What the doctor finds on a machine with a GPU."""

from __future__ import annotations

import pytest

from r2ccl.cli import main
from r2ccl.cli.gpufacts import read_cuda
from r2ccl.cli.gpus import examine_gpus
from r2ccl.config import Config
from r2ccl.device.bindings import Cuda
from r2ccl.errors import TransportError

try:
    Cuda()
except TransportError as exc:
    pytest.skip(f"the doctor's findings on a GPU: {exc}", allow_module_level=True)


def test_every_gpu_is_found_and_everything_is_tried_on_it() -> None:
    facts = read_cuda()
    assert (facts.doing, facts.died, facts.error) == ("", "", "")
    assert facts.driver >= 12000
    assert facts.bindings
    assert len(facts.gpus) == int(Cuda().call("cuDeviceGetCount"))
    assert [card.bus_id for card in facts.gpus] == [gpu.bus_id for gpu in facts.topology.gpus]
    for card in facts.gpus:
        assert card.name
        assert card.memory_nbytes > 1 << 30
        assert (card.open_error, card.kernel_error, card.ipc_error) == ("", "", "")
        assert card.waits_on_memory
        assert card.dmabuf_error is not None
        assert not card.dmabuf_error or "CUDA_ERROR_" in card.dmabuf_error
    assert facts.kernel_origin == "prebuilt"


def test_the_command_shows_the_outcome_of_the_export(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for finding in examine_gpus(read_cuda(), Config()):
        assert f" {finding.check} " in text
    (line,) = (line for line in text.splitlines() if line.split()[1:2] == ["dmabuf"])
    assert "exported" in line or "no export: " in line
