"""The command line, with one module per command.

Commands import torch only while they are executed, so that the help is printed quickly.
"""
