"""Health table of all rails, and the agreement of the ranks on its versions.

The ranks agree on which collective is the first to use a new version of the table.
"""
