"""Which schedule a call runs, made for what every node has left.

`planner` chooses among the candidates by `cost_model`, `placement` puts the edges of a schedule on
rails, `lowering` makes slices of its ops, and `plan_cache` keeps what was made.
"""
