"""Transports, which move slices over paths; `tcp`, `verbs` and `mixed` implement `base`."""
