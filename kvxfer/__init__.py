"""kvxfer moves a request's KV cache between two vLLM engines: see docs/architecture.md."""

__version__ = "0.1.0"
