"""Ranks that train at their own speed with a server of parameters: the strategy `async_server`."""
