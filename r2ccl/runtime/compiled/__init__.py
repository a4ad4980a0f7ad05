"""Collectives on host memory over TCP, run by compiled code until something unusual happens.

The compiled loop does for one call what links, lanes, data loop and TCP transport do in Python:

- `layout` has the tables that both sides read and write; `program` makes them from a plan;
- `system` has the system calls, `tables` the access to the tables, `steps` the dependencies and
  reductions, `sending` and `receiving` the frames, `loop` the loop itself: these are compiled;
- `call` fills in the tables before a call and, if it has finished, updates the links;
- `replay` continues a call in Python that compiled code has left.

Compiled code only does what the data loop would do with the same events. It logs the events, so
that Python can pass them to the links and lanes again, without the work that is done already.
"""
