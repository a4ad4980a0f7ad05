"""Transports move slices over paths: `tcp`, `verbs` and `mixed` implement the interface `base`."""
