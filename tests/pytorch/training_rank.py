"""Programs that train a small model on every rank, and compare it with one trained by one process.

Usage: ``training_rank.py NAME``. A program fails if the weights differ.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import r2ccl.torch  # noqa: F401  # registers the backend

NSTEPS, NROWS = 5, 12


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of all ranks together."""
    made = torch.Generator().manual_seed(1)
    for _ in range(NSTEPS):
        yield torch.randn(NROWS, 8, generator=made), torch.randn(NROWS, 4, generator=made)


def mine(rows: torch.Tensor) -> torch.Tensor:
    """Part of a batch that this rank computes."""
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def train(
    net: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    part: Callable[[torch.Tensor], torch.Tensor],
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        backward(torch.nn.functional.mse_loss(net(part(x)), part(y)))
        optimizer.step()


def sgd(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def reference() -> dict[str, torch.Tensor]:
    net = model()
    train(net, sgd(net), lambda rows: rows)
    return net.state_dict()


def require_equal(got: dict[str, torch.Tensor]) -> None:
    for name, wanted in reference().items():
        torch.testing.assert_close(got[name.removeprefix("module.")], wanted)


def require_equal_on_all_ranks(net: torch.nn.Module) -> None:
    for weights in net.parameters():
        copies = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, weights.detach())
        assert all(torch.equal(each, copies[0]) for each in copies)


def ddp() -> None:
    net = model()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1)
    train(wrapped, sgd(wrapped), mine)
    require_equal(net.state_dict())


def ddp_with_buckets_as_views() -> None:
    net = model()
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    train(wrapped, sgd(wrapped), mine)
    require_equal(net.state_dict())


def ddp_with_hook_in_float16() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = model()
    wrapped = DistributedDataParallel(net)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(wrapped, sgd(wrapped), mine)
    for name, wanted in reference().items():
        torch.testing.assert_close(net.state_dict()[name], wanted, rtol=0.02, atol=0.02)


def ddp_with_power_sgd() -> None:
    """Its callbacks wait for later calls; the weights are approximate, and equal on all ranks.

    There is one bucket: calls in callbacks and those of the next bucket have no order.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    net = model()
    wrapped = DistributedDataParallel(net)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(wrapped, sgd(wrapped), mine)
    require_equal_on_all_ranks(net)


def ddp_with_uneven_inputs() -> None:
    from torch.distributed.algorithms.join import Join

    net = DistributedDataParallel(model())
    nsteps = 3 + dist.get_rank()
    with Join([net]):
        for _ in range(nsteps):
            net(torch.ones(2, 8)).sum().backward()
    dist.barrier()


def fsdp1() -> None:
    """It resizes the gradients and weights that it has passed to collectives."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    train(net, sgd(net), mine)
    with FullyShardedDataParallel.summon_full_params(net):
        require_equal(dict(net.module.named_parameters()))


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, sgd(net), mine)
    require_equal({name: weights.full_tensor() for name, weights in net.state_dict().items()})


def zero_redundancy_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(wrapped, optimizer, mine)
    require_equal(net.state_dict())


def tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = model()
    whole = copy.deepcopy(net)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(net, mesh, {"2": ColwiseParallel(), "4": RowwiseParallel()})
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(net(x), whole(x))


def checkpoint() -> None:
    import tempfile

    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    weights = {"w": torch.full((4,), float(dist.get_rank() + 1)), "step": 7}
    dcp.save(weights, checkpoint_id=folder[0])
    found = {"w": torch.zeros(4), "step": 0}
    dcp.load(found, checkpoint_id=folder[0])
    assert found["step"] == 7
    assert found["w"][0] in (1.0, 2.0)


def pipeline() -> None:
    """Each rank has one stage; activations and their gradients go by send and recv."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, nranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(nranks)])
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    alone = copy.deepcopy(whole)
    torch.nn.functional.mse_loss(alone(x), y).backward()

    stage = PipelineStage(whole[rank], rank, nranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == nranks - 1 else {}))
    for own, expected in zip(whole[rank].parameters(), alone[rank].parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


def accelerate() -> None:
    """On CPUs, accelerate knows only gloo and mpi by name, but uses a group that exists."""
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), model()
    wrapped, optimizer = accelerator.prepare(net, sgd(net))
    assert isinstance(wrapped, DistributedDataParallel)
    train(wrapped, optimizer, mine, accelerator.backward)
    require_equal(net.state_dict())


class _Regression(torch.nn.Module):
    """Model in the form that transformers trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.net(x), labels)}


def trainer() -> None:
    """The trainer of transformers leaves equal weights on all ranks, other than before."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    rows = [{"x": x, "labels": y} for xs, ys in batches() for x, y in zip(xs, ys, strict=True)]
    regression = _Regression()
    before = [each.detach().clone() for each in regression.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, num_train_epochs=2, save_strategy="no", logging_strategy="no",
            report_to=[], disable_tqdm=True, learning_rate=0.01,
        )  # fmt: skip
        found = Trainer(regression, arguments, train_dataset=rows).train()
    assert found.global_step > 0
    require_equal_on_all_ranks(regression)
    for weights, untrained in zip(regression.parameters(), before, strict=True):
        assert not torch.equal(weights, untrained)


PROGRAMS = {
    each.__name__: each
    for each in (
        ddp, ddp_with_buckets_as_views, ddp_with_hook_in_float16, ddp_with_power_sgd,
        ddp_with_uneven_inputs, fsdp1, fsdp2, zero_redundancy_optimizer, tensor_parallel,
        checkpoint, pipeline, accelerate, trainer,
    )
}  # fmt: skip

if __name__ == "__main__":
    dist.init_process_group("r2ccl")
    for chosen in sys.argv[1:]:
        PROGRAMS[chosen]()
    dist.destroy_process_group()
