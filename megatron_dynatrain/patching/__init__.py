"""Patches for Megatron-LM source trees: which one is for a tree, whether it fits, applying and reverting it.

`diff` reads unified diffs and applies them exactly; `tree` knows the patches of `patches/` and a source tree; `command` is
`python -m megatron_dynatrain patch`.
"""
