"""The benchmark: what a switch costs, beside what it could cost at best and what the same change costs without it.

    scripts/bench.sh      or      python -m megatron_dynatrain bench

`cases` says which models walk through which layouts, `job` is what runs in every rank, `run` drives one job a model and
puts its records together, `show` prints the table and draws the plot, `planning_cost` is the part without ranks.
"""
