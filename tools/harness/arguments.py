"""Arguments of programs for measuring."""

import argparse


def new_parser(documentation: str | None) -> argparse.ArgumentParser:
    """One that prints a module's documentation as it is laid out."""
    return argparse.ArgumentParser(
        description=documentation, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]
