"""Tests of `auto`, mostly with simulated step times."""
