"""Rails, shared memory and GPUs that r2ccl will use on a machine, and fixes for what is missing.

The functions depend only on the findings and facts that `r2ccl.cli.doctor_report` collects, and on
the settings.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from r2ccl.cli.cards import CudaFacts
from r2ccl.cli.diagnosis import DoctorFinding, Facts, is_usable
from r2ccl.cli.rails import local_rails, select_ports
from r2ccl.config import Config
from r2ccl.errors import InvalidArgument
from r2ccl.topology.interfaces import select


class DoctorFindings(msgspec.Struct, frozen=True):
    """Findings about a machine, by section; ``sharing`` is the one about shared memory."""

    rails: tuple[DoctorFinding, ...]
    sharing: DoctorFinding
    gpus: tuple[DoctorFinding, ...]
    topology: tuple[DoctorFinding, ...]
    verbs: tuple[DoctorFinding, ...]


class Capabilities(msgspec.Struct, frozen=True):
    """Rails, transports within the host, and GPUs that ranks on this machine will use.

    ``rdma`` and ``tcp`` name the rails between hosts, except the rail of R2CC_LAST_RESORT, rails
    that are declared failed, and loopback. ``rdma`` is empty if verbs cannot be used. ``shm`` is
    True if ranks of this host share memory, and ``loopback`` is True if they can use TCP among
    themselves. Both are False if `r2ccl.init` refuses the settings. ``gpus`` are the CUDA ordinals
    of the GPUs whose memory collectives accept.
    """

    rdma: tuple[str, ...]
    tcp: tuple[str, ...]
    shm: bool
    loopback: bool
    gpus: tuple[int, ...]

    @property
    def is_any(self) -> bool:
        """True if ranks can exchange data, at least within this host."""
        return bool(self.rdma or self.tcp or self.shm or self.loopback)

    def __str__(self) -> str:
        if not self.is_any:
            return (
                "r2ccl will use nothing: init() raises InvalidArgument, see the error about rails"
            )
        within = "shared memory" if self.shm else "TCP" if self.loopback else "nothing"
        if self.rdma:
            between = f"RDMA over {', '.join(self.rdma)}"
        elif self.tcp:
            between = f"TCP over {', '.join(self.tcp)}"
        else:
            between = "nothing"
        numbers = ", ".join(map(str, self.gpus))
        gpus = f"arrays on GPU {numbers}" if self.gpus else "no GPU"
        return f"r2ccl will use {within} within this host, {between} between hosts, and {gpus}"


def capabilities_of(
    facts: Facts, cuda: CudaFacts, findings: DoctorFindings, config: Config
) -> Capabilities:
    """Return the `Capabilities` of ranks on this machine with the settings in `config`."""
    try:
        rails = [rail for rail in local_rails(facts, config) if not rail.is_failed]
    except InvalidArgument:  # reported among the findings about rails
        rails = []
    inside = [each.name for each in facts.interfaces if each.is_loopback]
    tcp = [r.name for r in rails if not (r.is_rdma or r.is_last_resort or r.name in inside)]
    is_accepted = _is_accepted(facts, config)
    can_use_verbs = is_usable(findings.verbs)
    return Capabilities(
        rdma=tuple(rail.name for rail in rails if rail.is_rdma and can_use_verbs),
        tcp=tuple(dict.fromkeys(tcp)),
        shm=is_accepted and findings.sharing.level == "ok",
        loopback=is_accepted,
        gpus=tuple(
            card.ordinal
            for card in cuda.gpus
            if card.open_error == "" and card.waits_on_memory and card.kernel_error == ""
        ),
    )


def missing_of(
    required: Sequence[str], found: Capabilities, findings: DoctorFindings, config: Config
) -> tuple[DoctorFinding, ...]:
    """Return an error, with a fix, for each name in `required` that cannot be used."""
    excluding = {"R2CC_HCA": config.hca, "R2CC_FAILED_NICS": config.failed_nics}
    settings = " and ".join(name for name, value in excluding.items() if value)
    has = {"rdma": found.rdma, "gpu": found.gpus, "shm": found.shm}
    reasons = {
        "rdma": (findings.verbs, f"unset {settings}" if settings else "see the section rails"),
        "gpu": (findings.gpus, "install a GPU with NVIDIA's driver, and pip install 'r2ccl[gpu]'"),
        "shm": (
            (findings.sharing, *(each for each in findings.rails if each.level == "error")),
            "unset R2CC_SHM",
        ),
    }
    return tuple(
        DoctorFinding(name, "error", "is required, but cannot be used", _fix_of(*reasons[name]))
        for name in dict.fromkeys(required)
        if not has[name]
    )


def _fix_of(findings: Sequence[DoctorFinding], default: str) -> str:
    """Return the fixes of all errors; without errors, of all warnings; without both, `default`."""
    for level in ("error", "warning"):
        fixes = [f"{each.check}: {each.fix}" for each in findings if each.level == level]
        if fixes:
            return "; ".join(fixes)
    return default


def _is_accepted(facts: Facts, config: Config) -> bool:
    """Return True if `r2ccl.init` accepts the settings when all ranks are on this host.

    Ranks that share memory also need an interface, because they open their connections over it.
    """
    try:
        select_ports(facts, config)
        return bool(select(facts.interfaces, config, is_one_host=True))
    except InvalidArgument:
        return False


__all__ = ["Capabilities", "DoctorFindings", "capabilities_of", "missing_of"]
