"""Types of command-line flags."""

import argparse


def positive(text: str) -> int:
    """'8' -> 8, for argparse. Raises ArgumentTypeError for what is no whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given, but a whole number from 1 is expected, such as 8")
    return int(text)
