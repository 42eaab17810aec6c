"""Benchmarks: `python -m benchmarks NAME [--json FILE]`. Times are ratios measured in one process, interleaved."""
