"""Collectives on host memory over TCP, in compiled code.

A compiled loop does the work of links, lanes, data loop and TCP transport, for one call at a time.
If it meets an event that it does not handle, such as a failed connection, it returns, and the data
loop finishes the call:

- `layout` defines the tables that compiled code and Python share; `program` makes them from a plan;
- `system` has the system calls, `tables` the access to the tables, `steps` the dependencies and
  reductions, `sending` and `receiving` the frames, `loop` the loop itself: these are compiled;
- `call` fills in the tables before a call and, if the call ended in compiled code, updates the
  links;
- `replay` otherwise brings links, lanes and connections to the state that compiled code reached.

Compiled code takes only the steps that the data loop would take with the same events. It logs the
events, so that `replay` can pass them to links and lanes again and skip the work that is done.
"""
