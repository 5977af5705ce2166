"""Tests of `bench decide`."""
