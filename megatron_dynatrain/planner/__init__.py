"""What a switch would do on any cluster, on a laptop: `python -m megatron_dynatrain plan`.

In the order of the command: a model file or a launch (`model_file`), every rank described dry in parallel processes
(`survey`), the plan (`planning`), its cost on given links and memory (`cluster`, `forecast`), and what is shown (`show`,
`pictures`).
"""
