"""The command line, with one module per command. Commands import torch only when they run, so help stays fast."""
