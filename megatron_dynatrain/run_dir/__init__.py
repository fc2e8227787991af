"""The run directory of a job: requests for switches from outside, their answers, and the job's status, as small JSON files.

    files       what stands in the directory, how it is published and how it is read
    ownership   one job a directory: who has it, and whether that job is alive
    watcher     the thread of rank 0 that reads requests and writes answers and status
    commands    `python -m megatron_dynatrain request | status | cancel`
"""
