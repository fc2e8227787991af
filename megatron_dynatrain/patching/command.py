"""`python -m megatron_dynatrain patch`: the patch for a Megatron-LM checkout, so that its jobs need no launcher."""

import argparse
import sys

from megatron_dynatrain.errors import PatchError
from megatron_dynatrain.patching import tree

HELP = "patch a Megatron-LM checkout, so that its jobs need no launcher"
DESCRIPTION = """Put --dynatrain-config and the call at the iteration boundary into a Megatron-LM source tree (see patches/),
or take them out again. The release is read from the tree. A patch is applied exactly or not at all: every line
around a change must be as the release has it, and after revert every byte is as it was.

  python -m megatron_dynatrain patch check ~/Megatron-LM
  python -m megatron_dynatrain patch apply ~/Megatron-LM

Exit codes: check says 0 for applied, 1 for not applied but it would fit, 2 for neither. apply and revert say 0
where the tree is as asked (also where it was so before), 2 where nothing was changed for a reason that is printed."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("check", "apply", "revert"), help="look at the tree, patch it, or undo the patch")
    parser.add_argument("tree", metavar="TREE", help="the folder that has megatron/ in it")


def run(flags: argparse.Namespace) -> int:
    """Carry out the action; its exit code."""
    try:
        found = tree.Tree(flags.tree)
        if flags.action == "check":
            if found.state in (tree.HALF, tree.FOREIGN):
                raise PatchError(found.describe())
            print(found.describe())
            return {tree.APPLIED: 0, tree.FITS: 1}[found.state]
        getattr(found, flags.action)()
        print(tree.Tree(flags.tree).describe())
        return 0
    except PatchError as error:
        print(error, file=sys.stderr)
        return 2
