"""`bench tune`, which chooses learning rates and other options for the user."""
