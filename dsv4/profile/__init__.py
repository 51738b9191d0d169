"""Graph-capture profiling: what every step program holds, moves, computes and should take, without weights or devices."""
