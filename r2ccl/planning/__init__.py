"""Planning: choose, place and slice the schedule of a call, given the health of all ranks' NICs.

`planner` chooses among candidate schedules by their predicted time (`cost_model`), `placement`
assigns the edges of a schedule to rails, `lowering` cuts its ops into slices, and `plan_cache`
keeps the resulting plans.
"""
