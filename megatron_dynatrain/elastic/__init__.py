"""The ranks of a job change while it trains.

Every process of a job has a number for life: its rank at the launch, or the next one when it joined. A *generation* is a world:
some of these numbers, in order, with a default group, Megatron's groups and a layout. The next generation is made beside the one
that trains (`formation`), by all that it takes, and taken at an iteration boundary; the state moves over the union of both.

    worlds        several default worlds of torch.distributed in one process
    job_store     the key-value store of the job, and the process that can hold it
    roster        who is there: the numbers of the job, and whether they live
    joining       what a process must agree with before it may join
    formation     one attempt at a generation: what each process makes, what rank 0 decides
"""
