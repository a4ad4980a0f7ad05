"""What a rank in a lab finds in its environment: torchrun's variables and r2ccl's own."""

from __future__ import annotations

from pathlib import Path

from r2ccl.testing.netlab.fabric import LabShape, nic_name

#: Namespaces have their ports to themselves, so these never clash.
MASTER_PORT = 29500
R2CC_PORT = 29501


def rank_environment(shape: LabShape, node: int, local_rank: int, secret: Path) -> dict[str, str]:
    """Return the variables of one rank.

    Parameters
    ----------
    shape : LabShape
    node, local_rank : int
    secret : Path
        File with the job's secret, readable by its owner only.
    """
    rails = ",".join(nic_name(rail) for rail in range(shape.rails))
    return {
        "RANK": str(node * shape.ranks_per_node + local_rank),
        "WORLD_SIZE": str(shape.nranks),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(shape.ranks_per_node),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": shape.management_address(0),
        "MASTER_PORT": str(MASTER_PORT),
        "R2CC_PORT": str(R2CC_PORT),
        "R2CC_SECRET_FILE": str(secret),
        "R2CC_CONTROL_ADDRESS": shape.management_address(node),
        # NCCL's spelling: a leading "=" makes the whole list exact.
        "R2CC_SOCKET_IFNAME": f"={rails}",
    }


__all__ = ["MASTER_PORT", "R2CC_PORT", "rank_environment"]
