"""The strategy `async_server`: ranks train at their own speed with a parameter server."""
