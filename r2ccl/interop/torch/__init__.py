"""Backend ``r2ccl`` of torch.distributed, on top of a `Communicator`.

A program changes one line, and imports this package::

    import r2ccl.torch

    torch.distributed.init_process_group("r2ccl")

The module ``r2ccl.torch`` imports this package. The import registers the backend; torch 2.14 and
newer import this package themselves. When the process group of all ranks is made, its ranks meet
through torch's store and connect the rails; all other groups share these connections. If the group
of all ranks has another backend, each group of r2ccl makes its own connections. docs/torch.md lists
what is supported and what differs from gloo.

Modules, in the order a call passes through them: ``process_group`` has the classes that torch
accepts, ``methods`` the methods that torch calls; ``call_queue`` runs the calls of a group in
order; ``collectives`` translates them to calls of a `Communicator`; ``tensors`` views tensors as
arrays; ``works`` has the handles that torch waits for. ``rendezvous`` makes the communicators.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from r2ccl.interop.torch.process_group import R2cclProcessGroup


def _create(options: object, backend_options: object) -> R2cclProcessGroup:
    """Make a process group; called by ``init_process_group`` and ``new_group``."""
    if backend_options is not None:
        raise TypeError(
            f"pg_options={backend_options!r}: the r2ccl backend has no options; leave pg_options "
            "out, and set R2CC_* environment variables instead, which the page Settings of the "
            "documentation lists"
        )
    return R2cclProcessGroup.connect(options)


def register() -> None:
    """Register the backend with torch, unless it is registered already.

    torch 2.14 and newer call this as the entry point ``r2ccl`` of ``torch.distributed.backends``.
    """
    if not hasattr(dist.Backend, "R2CCL"):
        dist.Backend.register_backend(
            "r2ccl",
            _create,
            extended_api=True,
            devices=["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"],
        )


register()

__all__ = ["R2cclProcessGroup"]
