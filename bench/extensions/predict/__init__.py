"""Predict a training step on links and among ranks that one does not have: `bench calibrate`, `bench predict`."""
