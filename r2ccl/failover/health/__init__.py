"""Health table of all rails, and the agreement on the first collective that uses a new version."""
