"""The KV-aware router: an OpenAI-compatible front for prefill and decode engines."""
