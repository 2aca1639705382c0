"""Benchmarks: few scripts, each writes raw samples to results/, tables are generated from those files."""
