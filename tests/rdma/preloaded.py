"""What a rank over verbs loads, for `forked_ranks`: modules, and the drivers of libibverbs.

Opens no device.
"""

import numpy.ma
from pyverbs.device import get_device_list

import r2ccl.bootstrap.startup
import r2ccl.transport.verbs.probe
import r2ccl.transport.verbs.transport

__all__ = ["numpy", "r2ccl"]

get_device_list()
