"""Benchmarks of an engine: offline in this process, or online over HTTP against any OpenAI server."""
