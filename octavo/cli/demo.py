"""`octavo demo`, which is in bench/."""

from octavo.cli.checkout import load_command

command = load_command("demo", "bench.demo.command")  # this module is imported when the command is run
