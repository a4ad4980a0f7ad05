"""Collectives and messages between ranks of one host, through memory that they share.

For each communicator, a rank owns one segment for collectives and messages, a sealed memfd that the
other ranks map; segments for arrays of the user are made on request. Modules:

- `segment` creates and maps segments, `passing` passes them to the other ranks;
- `layout` has the offsets in a segment, and the state in which a rank keeps its position in a call;
- `atomics` has the loads, stores and system calls that compiled code makes on shared memory;
- `waiting` waits in compiled code until a peer has advanced;
- `arrays` describes the arrays of a prepared call by numbers, which compiled code compares;
- `rounds` has the compiled steps that all collectives share; `transfer` chooses how a rank passes
  its data to its peers;
- `places` has the compiled steps by which peers access an array directly, `reading` the steps that
  read the memory of another process, and `single_copy` the steps that move data between arrays;
- `allreduce` is the compiled pipeline of large allreduces, `scan` the pipeline of scans, and
  `exchange` the compiled loop of all other collectives;
- `symmetric` makes the memory that all ranks map for a user's arrays, `room` reads the amount of
  memory left on the host, `mapping` maps shared memory;
- `robust_mutex` detects that the process of another rank has ended;
- `local_call` has `LocalCall`, a prepared call of a collective;
- `repeat` makes functions that run such a call again, and the function that chooses among them;
  `repeat_loop` has the compiled code of these functions;
- `group` has `LocalGroup`, the object that a communicator calls;
- `message_layout` has the offsets in the memory for messages, and the words of a rank's table;
- `frames` has the compiled steps of messages; `message_transfer` chooses whether a long message is
  read from the sender's process, and reads it; `pump` has the compiled loop that moves messages;
- `one_message` sends and receives in one compiled call; `repeat_message` makes functions that run
  such a call again, `repeat_message_loop` has their compiled code;
- `rings` has `Rings`, which `r2ccl.runtime.messages` uses;
- `machine` tells whether ranks can share memory on this kind of machine.

All collectives consist of *rounds*, which are numbered within their call. In a round, a rank copies
data into a stage slot of its segment and stores the number of the round in its word ``POSTED``.
Peers wait for this number and read the slot. If a rank may wait until the slot has been read, each
peer then stores the number in its word ``DONE``. In the first round of a call, each rank announces
a header with the call's signature instead of storing ``POSTED``. A rank waits for and compares the
headers of all ranks from which it receives data, so calls that differ are found before any output
is written.

A rank that only sends, such as the root of a broadcast, does not wait for the headers of its peers
in this call, so it may run some calls ahead of its peers. It compares these headers in a later
call: before a peer can overwrite its header, and before the rank overwrites a slot that a peer may
still read. In all collectives in which every rank receives data, every rank compares the headers of
all ranks.

If the header of a rank says where its input is, the peers access this array directly, and the call
of the rank returns when the peers no longer use the array.

Messages are frames in rings. Each ordered pair of ranks has one ring, which the sender writes. The
receiver takes frames in the order in which they were put. A message that no receive has taken does
not block the messages behind it: it is copied out of the ring, up to a limit, or only announced.
The data of an announced message comes through the ring, or the receiver reads it from the sender's
process.

Results are reduced in rank order, so they have the same bits on all ranks and in every run.
"""
