"""A server that holds the parameters, and the workers that push gradients to it at their own speed."""
