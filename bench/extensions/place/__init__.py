"""Layers placed on devices of several kinds: the strategy `placed`, and `bench place`, which predicts its step."""
