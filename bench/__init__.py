"""Benchmarks; no package imports them."""
