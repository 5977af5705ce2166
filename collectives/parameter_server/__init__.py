"""Parameter server: one rank holds the parameters; all ranks push gradients and pull parameters, each at its pace."""
