"""The `bench` script: its module has a name that no module of a user has."""

from gradwire.hidden_packages import exit_if_hidden


def main() -> None:
    """Run the command, once the package `bench` is known to be this project's."""
    exit_if_hidden(["bench"])
    from bench.__main__ import main as run

    run()
