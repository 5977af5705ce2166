"""Entry point of the `bench` command, in a module whose name cannot clash with a user's module."""

from gradwire.hidden_packages import exit_if_hidden


def main() -> None:
    """Run the command, after checking that Python finds this project's package `bench` and not a user's."""
    exit_if_hidden(["bench"])
    from bench.__main__ import main as run

    run()
