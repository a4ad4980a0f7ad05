"""Moves the slices of a failed path to other paths: fence, choose a route, replay.

`path` holds the state machine of a path; `link` numbers slices and decides which are replayed.
`links` has the paths and links of a rank, `calls` the numbers and signatures of its calls, `routes`
the path of each channel, `bypass` the search for a path between ranks without a common rail.
`driver` carries out the actions of `path`; `repairs` records failures and repairs.
"""
