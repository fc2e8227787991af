"""Adapters to Megatron-Core and megatron.training: the only place where a Megatron name appears.

`seams` lists every Megatron name that is wrapped, `versions` which releases were tested and where else they differ.
"""
