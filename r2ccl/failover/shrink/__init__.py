"""Shrink: the surviving ranks agree on the members of a new communicator and connect it."""
