"""Collectives on host memory, and exchanges of messages, over TCP in compiled code.

A compiled loop does the work of links, lanes (see `r2ccl.planning.lowering`), data loop and TCP
transport, for one call at a time. At an event that the compiled loop does not handle, such as the
failure of a connection, it returns, and the data loop finishes the call. An exchange of messages
(`r2ccl.runtime.messages.direct_calls`) is a call, too. The modules:

- `layout` defines the tables that compiled code and Python share; `program` makes them from a plan;
- `system` has the system calls, `tables` the access to the tables, `steps` the dependencies and
  reductions, `sending` and `receiving` the frames, and `loop` the loop itself; these modules are
  compiled;
- `repeated`, also compiled, repeats a call with the tables that its last run has left;
  `repeated_message` does the same for an exchange; `answer` makes the grants of long messages;
- `call` fills in the tables before a call; `link_update` updates the links after a call that ended
  in compiled code; `hold` keeps the tables of several such calls, so that each can be repeated;
  `hand_over`, also compiled, passes the state of the links from one of these calls to another;
- `replay` brings links, lanes and connections to the state that compiled code has reached, if the
  data loop has to finish the call.

Compiled code takes only the steps that the data loop would take with the same events, except that
it may post eager slices further ahead (`SLOTS` in `layout`). It logs the events, so that `replay`
can pass them to links and lanes and skip the work that is done.
"""
