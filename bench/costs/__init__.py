"""What a training step costs on devices and links that need not be here: a catalogue of figures, a model of time."""
