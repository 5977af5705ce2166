"""Model what a training step costs with layers placed on devices of several kinds: `bench place`."""
