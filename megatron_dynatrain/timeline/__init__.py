"""What became of a run: its report read back (`history`), as numbers (`summary`), tables (`show`) and a picture (`picture`).

Knows neither torch nor Megatron: it runs where the report lies.
"""
