"""`octavo bench WHAT`, which is in bench/."""

from octavo.cli.checkout import load_command

command = load_command("bench", "bench.command")  # this module is imported when the command is run
