"""Adapters to Megatron-Core and megatron.training: the only place where a Megatron name appears.

Checked against megatron-core 0.19.2; `seams` lists every Megatron name that is wrapped, `versions` what is accepted.
"""
