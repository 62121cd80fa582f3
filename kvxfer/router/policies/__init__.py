"""Who gets a request, and when that is decided: one small interface a question, one module a policy, a page each."""

from kvxfer.router.policies.asked import Asked, Picker

__all__ = ["Asked", "Picker"]
