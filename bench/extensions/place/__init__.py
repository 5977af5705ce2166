"""Model of a training step whose layers are placed on devices of several kinds: `bench place`."""
