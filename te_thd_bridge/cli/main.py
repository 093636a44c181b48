"""Dispatch of `te-thd-bridge <command>`: a command is a module with `add_arguments(parser)` and `run(arguments) -> int`."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Sequence

#: Command -> its help line.  Modules are imported when they run, so that no command pays for another.
COMMANDS = {
    "demo": "show a padded batch and train-like passes over real text, with errors against a reference",
    "explain": "rank the frontend's plans for an attention, with what each honours and how it can be served",
    "doctor": "list versions, libraries that clash and known-bad combinations, and try the attention backends at hand",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="te-thd-bridge", description="Padded-THD attention through cuDNN frontend graphs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_line in COMMANDS.items():
        subparser = commands.add_parser(name, help=help_line, description=help_line)
        if name in arguments[:1]:
            importlib.import_module(f"{__package__}.{name}").add_arguments(subparser)
    parsed = parser.parse_args(arguments)
    try:
        return importlib.import_module(f"{__package__}.{parsed.command}").run(parsed)
    except (ValueError, OSError) as error:
        print(f"te-thd-bridge {parsed.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
