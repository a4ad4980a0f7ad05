"""Transports move slices over paths: `base` is the interface, `tcp` and `verbs` implement it."""
