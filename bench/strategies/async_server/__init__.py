"""The strategy `async_server`: a parameter server that updates parameters as gradients arrive."""
