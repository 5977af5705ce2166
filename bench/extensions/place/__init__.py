"""The strategy `placed`: layers are placed on devices of several kinds. `bench place` predicts a step of it."""
