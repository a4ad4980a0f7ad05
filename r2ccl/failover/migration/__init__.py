"""Moves the slices of a failed path to other paths: fence, choose a route, replay.

`path` contains the state machine of a path. `link` numbers slices and decides which slices are
replayed. `links` keeps the paths and links of a rank, and `calls` keeps the numbers and signatures
of its calls. `routes` chooses the path of each channel. `bypass` searches for a path between ranks
without a common rail. `driver` carries out the actions of `path`. `repairs` records failures and
repairs.
"""
