"""Variables of the environment that look like settings of r2ccl, but are none.

A misspelt variable would have no effect. Rank 0 therefore names each one when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from r2ccl.config import Config, nearest

#: Variables of the published R2CCL that are also read.
_PUBLISHED = ("R2CC_FAILED_HCA", "R2CC_FAILED_NODE")
#: Variables that the library and its tests set for their own processes.
_OWN = (
    "R2CC_LISTEN_FD", "R2CC_FAULT_SOCKET", "R2CC_NETLAB_UNSHARED", "R2CC_CAMPAIGN_RUNS",
    "R2CC_FRESH", "R2CC_MATRIX_EVERY", "R2CC_SIM_EXAMPLES",
)  # fmt: skip
_OWN_PREFIXES = ("R2CC_RDMALAB", "R2CC_RDMA_")


def unknown(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Return the variables in `env` that begin like settings but have no effect.

    Yields
    ------
    name, advice : str
        The variable, and what to do about it.
    """
    settings = [f"R2CC_{name.upper()}" for name in Config.__struct_fields__]
    known = {*settings, *_PUBLISHED, *_OWN}
    for name in sorted(env):
        found = re.fullmatch("R2CCL?_(.+)", name)
        if found is None or name in known or name.startswith(_OWN_PREFIXES):
            continue
        stems = [each.removeprefix("R2CC_") for each in (*settings, *_PUBLISHED)]
        near = nearest(found[1].upper(), stems)
        yield name, f"did you mean R2CC_{near}?" if near else "unset it or correct its name"


__all__ = ["unknown"]
