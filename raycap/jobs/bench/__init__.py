"""`raycap bench`: the benchmarks behind BENCHMARKS.md, and the reference implementations they compare with."""
