"""The strategy `async_server`: a server that updates parameters as pushes arrive."""
